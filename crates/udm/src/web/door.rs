//! Who may come in.
//!
//! Any process of the machine can reach a port of loopback, and any page that a browser shows can
//! have it ask there. So: whoever asks must know the token, which stands in the address that
//! `udm web` prints and becomes a cookie of the browser's; the host that is asked for must be
//! loopback by name (else a name of somebody else's that leads here would read along); and what
//! changes something must come from this page (RFC 6454 has the origin) and be allowed by
//! `--write`.

use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::body::Bytes;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Uri};
use rand::RngExt;
use std::net::IpAddr;

/// The body of an answer.
pub(super) type Body = BoxBody<Bytes, hyper::Error>;

/// The cookie that has the token.
const COOKIE: &str = "udm_web";

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
pub(super) struct Door {
    token: String,
    write: bool,
}

impl Door {
    /// With a token that nobody can guess.
    pub fn new(write: bool) -> Door {
        let bytes: [u8; TOKEN_BYTES] = rand::rng().random();
        Door { token: bytes.iter().map(|byte| format!("{byte:02x}")).collect(), write }
    }

    /// The token.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Whether anybody may change anything.
    pub fn write(&self) -> bool {
        self.write
    }

    /// The answer to a request that may not come in: 403, or for an address with the token the way
    /// to the page. Nothing to one that may.
    pub fn keep_out<B>(&self, request: &Request<B>) -> Option<Response<Body>> {
        let head = request.headers();
        if !host(head).is_some_and(|host| is_loopback(&host)) {
            return Some(refused("this address is not one of loopback"));
        }
        if let Some(given) = query_token(request.uri()) {
            return Some(if self.knows(given) { self.welcome() } else { unknown() });
        }
        if !cookies(head).any(|(name, value)| name == COOKIE && self.knows(value)) {
            return Some(unknown());
        }
        if matches!(*request.method(), Method::GET | Method::HEAD) {
            return None;
        }
        if !self.write {
            return Some(refused("udm web was started without --write"));
        }
        (!from_here(head)).then(|| refused("this comes from another page"))
    }

    /// Compares as long for each wrong token of the right length.
    fn knows(&self, given: &str) -> bool {
        given.len() == self.token.len()
            && given.bytes().zip(self.token.bytes()).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
    }

    /// The token becomes a cookie, and leaves the address that others may see.
    fn welcome(&self) -> Response<Body> {
        let mut answer = said(StatusCode::SEE_OTHER, "");
        let cookie = format!("{COOKIE}={}; HttpOnly; SameSite=Strict; Path=/", self.token);
        let head = answer.headers_mut();
        head.insert(header::LOCATION, HeaderValue::from_static("/"));
        if let Ok(cookie) = HeaderValue::from_str(&cookie) {
            head.insert(header::SET_COOKIE, cookie);
        }
        answer
    }
}

/// The token of an address as it is printed.
fn query_token(uri: &Uri) -> Option<&str> {
    if uri.path() == "/" { uri.query()?.strip_prefix("token=") } else { None }
}

/// The host that is asked for, without its port.
fn host(head: &HeaderMap) -> Option<String> {
    let authority: hyper::http::uri::Authority = head.get(header::HOST)?.to_str().ok()?.parse().ok()?;
    Some(authority.host().trim_matches(['[', ']']).to_ascii_lowercase())
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

fn cookies(head: &HeaderMap) -> impl Iterator<Item = (&str, &str)> {
    let lines = head.get_all(header::COOKIE).into_iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='))
}

/// A browser says from which page a request is sent; one that changes something must say this one.
fn from_here(head: &HeaderMap) -> bool {
    let text = |name| head.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    match (text(header::ORIGIN), text(header::HOST)) {
        (Some(origin), Some(host)) => origin.strip_prefix("http://") == Some(host),
        _ => false,
    }
}

fn unknown() -> Response<Body> {
    refused("open the address that udm web printed: it has the token")
}

fn refused(why: &str) -> Response<Body> {
    said(StatusCode::FORBIDDEN, &format!("udm web: {why}\n"))
}

/// An answer of plain text.
pub(super) fn said(status: StatusCode, text: &str) -> Response<Body> {
    let body = Full::new(Bytes::copy_from_slice(text.as_bytes()));
    let mut answer = Response::new(body.map_err(|never| match never {}).boxed());
    *answer.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    answer.headers_mut().insert(header::CONTENT_TYPE, plain);
    answer
}

/// Keeps an answer to this page.
pub(super) fn closed_to_others(mut answer: Response<Body>) -> Response<Body> {
    for (name, value) in CLOSED {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(door: &Door, method: &str, target: &str, head: &[(&str, &str)]) -> u16 {
        let mut request = Request::builder().method(method).uri(target);
        for (name, value) in head {
            request = request.header(*name, value.replace("TOKEN", door.token()));
        }
        door.keep_out(&request.body(()).unwrap()).map_or(200, |refused| refused.status().as_u16())
    }

    const HOST: (&str, &str) = ("host", "127.0.0.1:8080");
    const KNOWN: (&str, &str) = ("cookie", "other=1; udm_web=TOKEN");
    const HERE: (&str, &str) = ("origin", "http://127.0.0.1:8080");

    #[test]
    fn the_token_is_asked_for() {
        let door = Door::new(false);
        assert_eq!(door.token().len(), 2 * TOKEN_BYTES);
        assert_ne!(door.token(), Door::new(false).token());
        assert_eq!(ask(&door, "GET", "/", &[HOST]), 403);
        assert_eq!(ask(&door, "GET", "/", &[HOST, KNOWN]), 200);
        assert_eq!(ask(&door, "GET", "/", &[HOST, ("cookie", "udm_web=")]), 403);
        assert_eq!(ask(&door, "GET", "/", &[HOST, ("cookie", "udm_web=TOKENx")]), 403);
        assert_eq!(ask(&door, "GET", "/v1/devices", &[HOST]), 403);
        assert_eq!(ask(&door, "GET", &format!("/?token={}", door.token()), &[HOST]), 303);
        assert_eq!(ask(&door, "GET", &format!("/?token={}", "0".repeat(32)), &[HOST, KNOWN]), 403);
        // Only the page's address has it.
        assert_eq!(ask(&door, "GET", &format!("/v1/devices?token={}", door.token()), &[HOST]), 403);
    }

    #[test]
    fn hosts_are_loopback() {
        let door = Door::new(false);
        for host in ["localhost", "LOCALHOST:1", "127.0.0.1:65535", "127.1.2.3", "[::1]:80", "[::1]"] {
            assert_eq!(ask(&door, "GET", "/", &[("host", host), KNOWN]), 200, "{host}");
        }
        for host in ["udm.example", "localhost.example:80", "192.0.2.1", "", "[::2]:80", "127.0.0.1.example"]
        {
            assert_eq!(ask(&door, "GET", "/", &[("host", host), KNOWN]), 403, "{host}");
        }
        assert_eq!(ask(&door, "GET", "/", &[KNOWN]), 403);
    }

    #[test]
    fn changes_need_write_and_this_page() {
        let (reads, writes) = (Door::new(false), Door::new(true));
        for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT"] {
            let target = if method == "CONNECT" { "127.0.0.1:80" } else { "/v1/devices" };
            assert_eq!(ask(&reads, method, target, &[HOST, KNOWN, HERE]), 403, "{method}");
            assert_eq!(ask(&writes, method, target, &[HOST, KNOWN, HERE]), 200, "{method}");
            assert_eq!(ask(&writes, method, target, &[HOST, HERE]), 403, "{method}");
            assert_eq!(ask(&writes, method, target, &[HOST, KNOWN]), 403, "{method}");
            for other in ["http://udm.example", "null", "https://127.0.0.1:8080", "http://127.0.0.1:8081"] {
                assert_eq!(ask(&writes, method, target, &[HOST, KNOWN, ("origin", other)]), 403, "{other}");
            }
        }
    }
}
