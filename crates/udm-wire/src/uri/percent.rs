//! Percent-encoding (RFC 3986, 2.1), as needed by udm's own forms and NBD URIs.

/// True for bytes that need no encoding in any part of the URIs that udm writes.
fn needs_no_percent_encoding(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b"-._~/:@".contains(&b)
}

/// Encodes each byte of `text` that could have another meaning as `%XX`.
pub(super) fn percent_encode_word(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for b in text.bytes() {
        if needs_no_percent_encoding(b) {
            out.push(char::from(b));
        } else {
            out.push_str(&format!("%{b:02X}"));
        }
    }
    out
}

/// Decodes `encoded`; a `+` is a plus.
pub(super) fn percent_decode_uri(encoded: &str) -> Result<String, &'static str> {
    let mut out = Vec::with_capacity(encoded.len());
    let mut bytes = encoded.bytes();
    while let Some(b) = bytes.next() {
        if b != b'%' {
            out.push(b);
            continue;
        }
        let mut digit = || bytes.next().and_then(|b| char::from(b).to_digit(16));
        let (Some(high), Some(low)) = (digit(), digit()) else {
            return Err("a % that two hexadecimal digits do not follow");
        };
        out.push((high * 16 + low) as u8);
    }
    String::from_utf8(out).map_err(|_| "percent-encoded bytes that are not UTF-8")
}
