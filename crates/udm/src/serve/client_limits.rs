//! Limits of NBD clients as a whole: where they may come from, how many, and for how long.

use crate::args::parse_seconds;
use clap::Args;
use ipnet::IpNet;
use std::net::IpAddr;
use std::time::Duration;
use udm_frontends::nbd::NbdServerLimits;
use udm_wire::size::parse_size_with_unit;

/// The range of `--core-memory`, in bytes.
const CORE_MEMORY_MIN: u64 = 16 << 20;
const CORE_MEMORY_MAX: u64 = 1 << 40;

/// The options that limit NBD clients.
#[derive(Debug, Args)]
pub struct ClientLimitArgs {
    /// Serve only TCP clients of this address or network, as 192.0.2.0/24; may be repeated
    /// [default: all]. Clients of the Unix socket are not affected
    #[arg(long = "allow", value_name = "ADDRESS[/BITS]", requires = "tcp", value_parser = parse_network)]
    pub allow: Vec<IpNet>,
    /// Clients at a time; those above are refused. The limit on open files may allow fewer
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = parse_count)]
    pub max_connections: usize,
    /// Clients of one address, or of one user on the Unix socket [default: three quarters of
    /// --max-connections]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub max_connections_per_peer: Option<usize>,
    /// Clients of one device, of which one peer gets three quarters [default: three quarters of
    /// --max-connections]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub max_connections_per_device: Option<usize>,
    /// How long a client may take until it has chosen an export (1 to 3600)
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = parse_time_limit)]
    pub handshake_timeout: Duration,
    /// Disconnect a client that has had no request for this long (1 to 3600) [default: never]
    #[arg(long, value_name = "SECONDS", value_parser = parse_time_limit)]
    pub idle_timeout: Option<Duration>,
    /// Memory that the clients of one core share for their requests (16M to 1T). Each has 640K
    /// besides
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_core_memory)]
    pub core_memory: u64,
}

impl ClientLimitArgs {
    /// The limits of the NBD server.
    pub fn server_limits(&self) -> NbdServerLimits {
        let part = (self.max_connections * 3 / 4).max(1);
        NbdServerLimits {
            connections_max: self.max_connections,
            peer_connections_max: self.max_connections_per_peer.unwrap_or(part),
            device_connections_max: self.max_connections_per_device.unwrap_or(part),
            handshake_max: self.handshake_timeout,
            idle_max: self.idle_timeout,
            core_bytes_max: usize::try_from(self.core_memory).unwrap_or(usize::MAX),
            networks: (!self.allow.is_empty()).then(|| self.allow.clone().into()),
            ..NbdServerLimits::default()
        }
    }
}

/// Parses an address or a network.
fn parse_network(word: &str) -> Result<IpNet, String> {
    let network = match word.parse::<IpAddr>() {
        Ok(address) => IpNet::from(address),
        Err(_) => word.parse().map_err(|_| "expected an address, or a network as 192.0.2.0/24")?,
    };
    if network.trunc() != network {
        return Err(format!("it has bits beyond its prefix: expected {}", network.trunc()));
    }
    Ok(network)
}

/// Parses a number of connections.
fn parse_count(word: &str) -> Result<usize, String> {
    let count = word.parse().ok().filter(|count| (1..=1 << 20).contains(count));
    count.ok_or_else(|| "expected a number from 1 to 1048576".into())
}

/// Parses a time limit for clients.
fn parse_time_limit(word: &str) -> Result<Duration, String> {
    let range = Duration::from_secs(1)..=Duration::from_secs(3600);
    parse_seconds(word)
        .and_then(|time| if range.contains(&time) { Ok(time) } else { Err("not in 1..=3600".into()) })
}

/// Parses the memory of a core.
fn parse_core_memory(word: &str) -> Result<u64, String> {
    let size = parse_size_with_unit(word).map_err(|error| error.to_string())?;
    if (CORE_MEMORY_MIN..=CORE_MEMORY_MAX).contains(&size) { Ok(size) } else { Err("not in 16M..=1T".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_read_or_refused() {
        for (word, shown) in [
            ("192.0.2.1", "192.0.2.1/32"),
            ("192.0.2.0/24", "192.0.2.0/24"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("2001:db8::/32", "2001:db8::/32"),
            ("::1", "::1/128"),
        ] {
            assert_eq!(parse_network(word).unwrap().to_string(), shown);
        }
        for word in
            ["", "192.0.2", "192.0.2.0/33", "192.0.2.0/", "host", "::/129", "192.0.2.0/-1", "1.2.3.4/8 "]
        {
            assert!(parse_network(word).unwrap_err().contains("expected an address"), "{word}");
        }
        assert!(parse_network("192.0.2.1/24").unwrap_err().ends_with("expected 192.0.2.0/24"));
    }
}
