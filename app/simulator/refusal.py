"""What the API says when it does not do what was asked."""

from typing import Any

Json = dict[str, Any]

ERROR_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class Refused(Exception):
    """A request that is answered with an error and changes nothing."""

    def __init__(
        self, status: int, message: str, *, error_type: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.error_type = error_type or ERROR_TYPE_OF_STATUS.get(status, "api_error")
        self.code = code


def error_body(refused: Refused, request_id: str) -> Json:
    """Return the JSON of an error response."""
    error: Json = {"type": refused.error_type, "message": refused.message}
    if refused.code is not None:
        error["details"] = {"error_code": refused.code}
    return {"type": "error", "error": error, "request_id": request_id}
