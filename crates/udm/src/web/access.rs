//! Access control of the web page.
//!
//! Any process of the machine can reach a loopback port, and any page in a browser can make the
//! browser send requests to it. So every request except those for the page's files needs a token.
//! The token is after the `#` of the address that `udm web` prints; a browser sends this part to
//! nobody. The page sends the token in a header (RFC 6750), which a browser never adds by itself. A
//! cookie would also go to every other port of this host (RFC 6265, 8.5). The `Host` header must
//! name loopback; otherwise a foreign name that resolves to this address could read along (DNS
//! rebinding). Requests that change something also need `--write`.

use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::body::Bytes;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use rand::RngExt;
use std::net::IpAddr;

/// The body of a response.
pub(super) type HttpResponseBody = BoxBody<Bytes, hyper::Error>;

/// Bytes of a token; each is written as two hexadecimal digits.
const TOKEN_BYTES: usize = 16;

/// Security headers of every response. The page loads nothing from other origins, and no other page
/// may embed it.
const CLOSED: &[(HeaderName, &str)] = &[
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
];

/// The access rules of one `udm web`.
pub(super) struct WebAccessRules {
    token: String,
    write: bool,
}

impl WebAccessRules {
    /// Creates the rules with a random token.
    pub fn new(write: bool) -> WebAccessRules {
        let bytes: [u8; TOKEN_BYTES] = rand::rng().random();
        WebAccessRules { token: bytes.iter().map(|byte| format!("{byte:02x}")).collect(), write }
    }

    /// The token.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// True if the page may change devices.
    pub fn write(&self) -> bool {
        self.write
    }

    /// Returns the response 403 if the request is not allowed, else `None`. A request for a file of
    /// the page (`is_page`) needs no token, because these files hold no secrets.
    pub fn reject<B>(&self, request: &Request<B>, is_page: bool) -> Option<Response<HttpResponseBody>> {
        let head = request.headers();
        if !host_from_header(head).is_some_and(|host| is_loopback(&host)) {
            return Some(forbidden_response("this address is not one of loopback"));
        }
        if is_page {
            return None;
        }
        if !bearer(head).is_some_and(|given| self.knows(given)) {
            return Some(forbidden_response("open the address that udm web printed: it has the token"));
        }
        let reads = matches!(*request.method(), Method::GET | Method::HEAD);
        (!reads && !self.write).then(|| forbidden_response("udm web was started without --write"))
    }

    /// Compares in constant time for tokens of the right length.
    fn knows(&self, given: &str) -> bool {
        given.len() == self.token.len()
            && given.bytes().zip(self.token.bytes()).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
    }
}

/// The token of the request's `Authorization` header.
fn bearer(head: &HeaderMap) -> Option<&str> {
    head.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")
}

/// The host of the request's `Host` header, without its port.
fn host_from_header(head: &HeaderMap) -> Option<String> {
    let authority: hyper::http::uri::Authority = head.get(header::HOST)?.to_str().ok()?.parse().ok()?;
    Some(authority.host().trim_matches(['[', ']']).to_ascii_lowercase())
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

fn forbidden_response(why: &str) -> Response<HttpResponseBody> {
    text_response(StatusCode::FORBIDDEN, &format!("udm web: {why}\n"))
}

/// A plain text response.
pub(super) fn text_response(status: StatusCode, text: &str) -> Response<HttpResponseBody> {
    let body = Full::new(Bytes::copy_from_slice(text.as_bytes()));
    let mut answer = Response::new(body.map_err(|never| match never {}).boxed());
    *answer.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    answer.headers_mut().insert(header::CONTENT_TYPE, plain);
    answer
}

/// Adds the security headers to a response.
pub(super) fn add_security_headers(mut answer: Response<HttpResponseBody>) -> Response<HttpResponseBody> {
    for (name, value) in CLOSED {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(check: &WebAccessRules, method: &str, target: &str, head: &[(&str, &str)]) -> u16 {
        let mut request = Request::builder().method(method).uri(target);
        for (name, value) in head {
            request = request.header(*name, value.replace("TOKEN", check.token()));
        }
        check
            .reject(&request.body(()).unwrap(), target == "/")
            .map_or(200, |forbidden| forbidden.status().as_u16())
    }

    const HOST: (&str, &str) = ("host", "127.0.0.1:8080");
    const KNOWN: (&str, &str) = ("authorization", "Bearer TOKEN");

    #[test]
    fn the_token_is_asked_for() {
        let check = WebAccessRules::new(false);
        assert_eq!(check.token().len(), 2 * TOKEN_BYTES);
        assert_ne!(check.token(), WebAccessRules::new(false).token());
        assert_eq!(ask(&check, "GET", "/", &[HOST]), 200, "the page has nothing to hide");
        assert_eq!(ask(&check, "GET", "/v1/devices", &[HOST]), 403);
        assert_eq!(ask(&check, "GET", "/v1/devices", &[HOST, KNOWN]), 200);
        for other in ["Bearer ", "Bearer TOKENx", "Basic TOKEN", "TOKEN"] {
            assert_eq!(ask(&check, "GET", "/v1/devices", &[HOST, ("authorization", other)]), 403, "{other}");
        }
        // A token in the URL or in a cookie is not accepted: others can see it, or the browser
        // sends it by itself.
        assert_eq!(ask(&check, "GET", &format!("/v1/devices?token={}", check.token()), &[HOST]), 403);
        assert_eq!(ask(&check, "GET", "/v1/devices", &[HOST, ("cookie", "udm_web=TOKEN")]), 403);
    }

    #[test]
    fn hosts_are_loopback() {
        let check = WebAccessRules::new(false);
        for target in ["/", "/v1/devices"] {
            for host in ["localhost", "LOCALHOST:1", "127.0.0.1:65535", "127.1.2.3", "[::1]:80", "[::1]"] {
                assert_eq!(ask(&check, "GET", target, &[("host", host), KNOWN]), 200, "{host}");
            }
            for host in
                ["udm.example", "localhost.example:80", "192.0.2.1", "", "[::2]:80", "127.0.0.1.example"]
            {
                assert_eq!(ask(&check, "GET", target, &[("host", host), KNOWN]), 403, "{host}");
            }
            assert_eq!(ask(&check, "GET", target, &[KNOWN]), 403);
        }
    }

    #[test]
    fn changes_need_write_and_the_token() {
        let (reads, writes) = (WebAccessRules::new(false), WebAccessRules::new(true));
        for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT"] {
            let target = if method == "CONNECT" { "127.0.0.1:80" } else { "/v1/devices" };
            assert_eq!(ask(&reads, method, target, &[HOST, KNOWN]), 403, "{method}");
            assert_eq!(ask(&writes, method, target, &[HOST, KNOWN]), 200, "{method}");
            assert_eq!(ask(&writes, method, target, &[HOST]), 403, "{method}");
        }
    }
}
