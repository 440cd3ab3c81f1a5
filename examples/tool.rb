# A tool for Bascule, Ruby 3.1 with the gem webrick: TOOL_SECRET=whsec_… ruby examples/tool.rb
require "json"
require "openssl"
require "webrick"

SECRET = begin
  ENV.fetch("TOOL_SECRET", "").delete_prefix("whsec_").unpack1("m0")
rescue ArgumentError
  ""
end
if SECRET.bytesize < 24
  abort "usage: TOOL_SECRET=whsec_… ruby examples/tool.rb   (the signing_secret of the tool)"
end

def signed?(request)
  sent_at = request["webhook-timestamp"].to_s
  signed = "#{request["webhook-id"]}.#{sent_at}.#{request.body}"
  expected = "v1,#{OpenSSL::HMAC.base64digest("SHA256", SECRET, signed)}"
  entries = request["webhook-signature"].to_s.split
  ours = entries.any? { |entry| OpenSSL.secure_compare(entry, expected) }
  ours && (Time.now.to_i - sent_at.to_i).abs < 300
end

def look_up_order(message)
  case message # data holds call_id, session_id, tool and more besides
  in { data: { input: { order_id: String => order_id } } }
    { content: "order #{order_id} has shipped" }
  else
    { content: "order_id must be a text such as A-1042", is_error: true }
  end
end

server = WEBrick::HTTPServer.new(BindAddress: "127.0.0.1", Port: ENV.fetch("PORT", 9000).to_i)
server.mount_proc "/" do |request, response|
  if signed?(request)
    response.content_type = "application/json"
    response.body = JSON.generate(look_up_order(JSON.parse(request.body, symbolize_names: true)))
  else
    response.status = 401
    response.content_type = "text/plain"
    response.body = "bad signature: is TOOL_SECRET the signing_secret of this tool?\n"
  end
end
trap("INT") { server.shutdown }
server.start
