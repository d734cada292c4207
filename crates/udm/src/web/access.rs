//! Who may come in.
//!
//! Any process of the machine can reach a port of loopback, and any page that a browser shows can
//! have it ask there. So: who asks for anything but the page itself must know the token. It stands
//! behind the `#` of the address that `udm web` prints, which a browser sends nobody; the page
//! sends it in a header (RFC 6750), which a browser adds to nothing by itself. A cookie would go to
//! every other port of this host too (RFC 6265, 8.5). The host that is asked for must be loopback
//! by name, else a name of somebody else's that leads here would read along; and `--write` must
//! allow what changes something.

use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::body::Bytes;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use rand::RngExt;
use std::net::IpAddr;

/// The body of an answer.
pub(super) type Body = BoxBody<Bytes, hyper::Error>;

/// Bytes of a token; it is written with two digits each.
const TOKEN_BYTES: usize = 16;

/// What every answer says to the browser: nothing from elsewhere is shown in the page, and the page
/// is shown nowhere else.
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

/// The door of one `udm web`.
pub(super) struct AccessCheck {
    token: String,
    write: bool,
}

impl AccessCheck {
    /// With a token that nobody can guess.
    pub fn new(write: bool) -> AccessCheck {
        let bytes: [u8; TOKEN_BYTES] = rand::rng().random();
        AccessCheck { token: bytes.iter().map(|byte| format!("{byte:02x}")).collect(), write }
    }

    /// The token.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Whether anybody may change anything.
    pub fn write(&self) -> bool {
        self.write
    }

    /// The answer to a request that may not come in: 403. Nothing to one that may; a request for a
    /// file of the page (`is_page`) needs no token, for there is nothing in it.
    pub fn reject<B>(&self, request: &Request<B>, is_page: bool) -> Option<Response<Body>> {
        let head = request.headers();
        if !host(head).is_some_and(|host| is_loopback(&host)) {
            return Some(forbidden("this address is not one of loopback"));
        }
        if is_page {
            return None;
        }
        if !bearer(head).is_some_and(|given| self.knows(given)) {
            return Some(forbidden("open the address that udm web printed: it has the token"));
        }
        let reads = matches!(*request.method(), Method::GET | Method::HEAD);
        (!reads && !self.write).then(|| forbidden("udm web was started without --write"))
    }

    /// Compares as long for each wrong token of the right length.
    fn knows(&self, given: &str) -> bool {
        given.len() == self.token.len()
            && given.bytes().zip(self.token.bytes()).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
    }
}

/// The token that a request has with it.
fn bearer(head: &HeaderMap) -> Option<&str> {
    head.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")
}

/// The host that is asked for, without its port.
fn host(head: &HeaderMap) -> Option<String> {
    let authority: hyper::http::uri::Authority = head.get(header::HOST)?.to_str().ok()?.parse().ok()?;
    Some(authority.host().trim_matches(['[', ']']).to_ascii_lowercase())
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

fn forbidden(why: &str) -> Response<Body> {
    text_response(StatusCode::FORBIDDEN, &format!("udm web: {why}\n"))
}

/// An answer of plain text.
pub(super) fn text_response(status: StatusCode, text: &str) -> Response<Body> {
    let body = Full::new(Bytes::copy_from_slice(text.as_bytes()));
    let mut answer = Response::new(body.map_err(|never| match never {}).boxed());
    *answer.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    answer.headers_mut().insert(header::CONTENT_TYPE, plain);
    answer
}

/// Keeps an answer to this page.
pub(super) fn add_security_headers(mut answer: Response<Body>) -> Response<Body> {
    for (name, value) in CLOSED {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(door: &AccessCheck, method: &str, target: &str, head: &[(&str, &str)]) -> u16 {
        let mut request = Request::builder().method(method).uri(target);
        for (name, value) in head {
            request = request.header(*name, value.replace("TOKEN", door.token()));
        }
        door.reject(&request.body(()).unwrap(), target == "/")
            .map_or(200, |forbidden| forbidden.status().as_u16())
    }

    const HOST: (&str, &str) = ("host", "127.0.0.1:8080");
    const KNOWN: (&str, &str) = ("authorization", "Bearer TOKEN");

    #[test]
    fn the_token_is_asked_for() {
        let door = AccessCheck::new(false);
        assert_eq!(door.token().len(), 2 * TOKEN_BYTES);
        assert_ne!(door.token(), AccessCheck::new(false).token());
        assert_eq!(ask(&door, "GET", "/", &[HOST]), 200, "the page has nothing to hide");
        assert_eq!(ask(&door, "GET", "/v1/devices", &[HOST]), 403);
        assert_eq!(ask(&door, "GET", "/v1/devices", &[HOST, KNOWN]), 200);
        for other in ["Bearer ", "Bearer TOKENx", "Basic TOKEN", "TOKEN"] {
            assert_eq!(ask(&door, "GET", "/v1/devices", &[HOST, ("authorization", other)]), 403, "{other}");
        }
        // Where others see it, or a browser sends it by itself, it counts for nothing.
        assert_eq!(ask(&door, "GET", &format!("/v1/devices?token={}", door.token()), &[HOST]), 403);
        assert_eq!(ask(&door, "GET", "/v1/devices", &[HOST, ("cookie", "udm_web=TOKEN")]), 403);
    }

    #[test]
    fn hosts_are_loopback() {
        let door = AccessCheck::new(false);
        for target in ["/", "/v1/devices"] {
            for host in ["localhost", "LOCALHOST:1", "127.0.0.1:65535", "127.1.2.3", "[::1]:80", "[::1]"] {
                assert_eq!(ask(&door, "GET", target, &[("host", host), KNOWN]), 200, "{host}");
            }
            for host in
                ["udm.example", "localhost.example:80", "192.0.2.1", "", "[::2]:80", "127.0.0.1.example"]
            {
                assert_eq!(ask(&door, "GET", target, &[("host", host), KNOWN]), 403, "{host}");
            }
            assert_eq!(ask(&door, "GET", target, &[KNOWN]), 403);
        }
    }

    #[test]
    fn changes_need_write_and_the_token() {
        let (reads, writes) = (AccessCheck::new(false), AccessCheck::new(true));
        for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT"] {
            let target = if method == "CONNECT" { "127.0.0.1:80" } else { "/v1/devices" };
            assert_eq!(ask(&reads, method, target, &[HOST, KNOWN]), 403, "{method}");
            assert_eq!(ask(&writes, method, target, &[HOST, KNOWN]), 200, "{method}");
            assert_eq!(ask(&writes, method, target, &[HOST]), 403, "{method}");
        }
    }
}
