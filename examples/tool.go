// A tool for Bascule, Go's standard library only: TOOL_SECRET=whsec_… go run examples/tool.go
package main

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

const bodyBytesMax = 10_000_000

var secret, _ = base64.StdEncoding.DecodeString(strings.TrimPrefix(os.Getenv("TOOL_SECRET"), "whsec_"))

func isSigned(header http.Header, body []byte) bool {
	mac := hmac.New(sha256.New, secret)
	fmt.Fprintf(mac, "%s.%s.%s", header.Get("webhook-id"), header.Get("webhook-timestamp"), body)
	expected := []byte("v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil)))
	sentAt, err := strconv.ParseInt(header.Get("webhook-timestamp"), 10, 64)
	if age := time.Now().Unix() - sentAt; err != nil || age > 300 || age < -300 {
		return false
	}
	for _, entry := range strings.Fields(header.Get("webhook-signature")) {
		if hmac.Equal([]byte(entry), expected) {
			return true
		}
	}
	return false
}

func lookUpOrder(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, bodyBytesMax))
	if err != nil || !isSigned(r.Header, body) {
		w.Header().Set("content-type", "text/plain")
		w.WriteHeader(http.StatusUnauthorized)
		fmt.Fprintln(w, "bad signature: is TOOL_SECRET the signing_secret of this tool?")
		return
	}
	var call struct {
		Data struct { // call_id, session_id, tool and more besides
			Input struct {
				OrderID *string `json:"order_id"`
			}
		}
	}
	reply := map[string]any{"content": "order_id must be a text such as A-1042", "is_error": true}
	if json.Unmarshal(body, &call) == nil && call.Data.Input.OrderID != nil {
		reply = map[string]any{"content": "order " + *call.Data.Input.OrderID + " has shipped"}
	}
	w.Header().Set("content-type", "application/json")
	json.NewEncoder(w).Encode(reply)
}

func main() {
	port := os.Getenv("PORT")
	if port == "" {
		port = "9000"
	}
	if len(secret) < 24 {
		fmt.Fprintln(os.Stderr, "usage: TOOL_SECRET=whsec_… go run examples/tool.go   (the signing_secret of the tool)")
		os.Exit(1)
	}
	log.Fatal(http.ListenAndServe("127.0.0.1:"+port, http.HandlerFunc(lookUpOrder)))
}
