//! The names in a certificate.

use std::net::IpAddr;
use x509_cert::Certificate;
use x509_cert::der::Decode;
use x509_cert::ext::pkix::SubjectAltName;
use x509_cert::ext::pkix::name::GeneralName;

/// The common name of the subject, and its alternative names: DNS names, mail addresses, URIs and
/// IP addresses. Empty for a certificate that cannot be parsed.
pub(crate) fn certificate_names(der: &[u8]) -> Vec<String> {
    let Ok(certificate) = Certificate::from_der(der) else { return Vec::new() };
    let certificate = certificate.tbs_certificate();
    let common = certificate.subject().common_name().ok().flatten();
    let mut names: Vec<String> = common.map(|name| name.value().to_string()).into_iter().collect();
    if let Ok(Some((_, alternative))) = certificate.get_extension::<SubjectAltName>() {
        names.extend(alternative.0.iter().filter_map(|name| match name {
            GeneralName::DnsName(name)
            | GeneralName::Rfc822Name(name)
            | GeneralName::UniformResourceIdentifier(name) => Some(name.to_string()),
            GeneralName::IpAddress(bytes) => ip_address(bytes.as_bytes()).map(|ip| ip.to_string()),
            _ => None,
        }));
    }
    names
}

fn ip_address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}
