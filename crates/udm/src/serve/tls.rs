//! TLS of the NBD server, as the options say, and its certificates at SIGHUP.

use super::args::{ServeArgs, TlsModeArg};
use crate::log;
use anyhow::{Result, bail};
use std::net::IpAddr;
use std::sync::Arc;
use udm_frontends::nbd::NbdServerTls;
use udm_tls::TlsServerConfig;

/// Reads the certificates, if TLS is on.
///
/// # Errors
/// The options do not fit together, or a file is missing or not valid.
pub(super) fn load_server_tls(args: &ServeArgs) -> Result<Option<NbdServerTls>> {
    let folder = match (args.tls, &args.tls_certificates) {
        (TlsModeArg::Off, None) => return Ok(None),
        (TlsModeArg::Off, Some(_)) => bail!("tls-certificates: TLS is off; add --tls=on or --tls=require"),
        (_, None) => bail!("tls: expected --tls-certificates with a folder of certificates"),
        (_, Some(folder)) => folder,
    };
    let config = TlsServerConfig::load(folder, args.tls_verify_peer)?;
    Ok(Some(NbdServerTls { config: Arc::new(config), is_required: args.tls == TlsModeArg::Require }))
}

/// True if the names of clients are known.
pub(super) fn proves_clients(args: &ServeArgs) -> bool {
    args.tls != TlsModeArg::Off && args.tls_verify_peer
}

/// Warns if others on the network may read and write without being asked who they are.
pub(super) fn warn_about_open_port(args: &ServeArgs) {
    for address in args.nvme.iter().filter(|address| !is_loopback(address.ip())) {
        tracing::warn!(
            "nvme: whoever reaches {address} reads and writes without encryption: use a network of its own, \
             and --allow"
        );
    }
    let Some(port) = args.port.filter(|_| args.tls != TlsModeArg::Require) else { return };
    for address in args.ipaddr.iter().filter(|address| !is_loopback(**address)) {
        tracing::warn!(
            "nbd: whoever reaches port {port} of {address} reads and writes without encryption: --tls=require \
             with --tls-verify-peer admits known clients only"
        );
    }
}

fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

/// Reads the certificates again; connections that exist keep the old ones.
pub(super) fn reload_certificates(tls: &NbdServerTls) {
    let folder = tls.config.folder().display();
    let line = match tls.config.reload() {
        Ok(()) => format!("udm: the certificates of {folder} are read again\n"),
        Err(error) => format!("udm: the old certificates stay in use: {error}\n"),
    };
    log::queue_stderr_text(&line);
}
