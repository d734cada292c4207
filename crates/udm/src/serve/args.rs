//! The arguments of `udm serve`.

use super::client_limits::ClientLimitArgs;
use super::nvme::{NvmeAnaSetting, NvmeSecretFile};
use super::path_maintenance::PathCheckInterval;
use super::socket_access::parse_unix_mode;
use crate::args::{StateFolderArgs, parse_seconds, parse_socket_path};
use crate::table_arg::{DeviceTableArg, parse_device_table_arg};
use clap::{ArgGroup, Args, Command, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use udm_wire::cpus::CpuList;
use udm_wire::ublk::NUMBER_MAX;

/// The value of `--lost-snapshots`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LostSnapshotsArg {
    /// The disk is not served.
    #[default]
    Refuse,
    /// The disk is served once its snapshots can be attached.
    Wait,
    /// The snapshots are given up, and the disk is served at once.
    GiveUp,
}

impl From<LostSnapshotsArg> for udm_control::verbs::snapshot::LostSnapshotPolicy {
    fn from(arg: LostSnapshotsArg) -> Self {
        match arg {
            LostSnapshotsArg::Refuse => Self::Refuse,
            LostSnapshotsArg::Wait => Self::Wait,
            LostSnapshotsArg::GiveUp => Self::GiveUp,
        }
    }
}

/// The value of `--tls`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum TlsModeArg {
    /// There is no TLS.
    #[default]
    Off,
    /// A client may begin TLS.
    On,
    /// A client must begin TLS.
    Require,
}

/// A value of `--vhost-user`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostUserDiskArg {
    /// Name of the device.
    pub name: String,
    /// Path of the socket.
    pub path: PathBuf,
}

/// A value of `--vhost-user-fd`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostUserFdArg {
    /// Name of the device.
    pub name: String,
    /// Number of the descriptor.
    pub fd: i32,
}

/// A value of `--ublk`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UblkDiskArg {
    /// Name of the device.
    pub name: String,
    /// Number of the block device; `None` for any.
    pub number: Option<u32>,
}

/// The arguments of `udm serve`.
#[derive(Debug, Args)]
#[command(
    after_help = "A TABLE has one target per line: START LENGTH TYPE ARGUMENTS, in sectors of 512 bytes, as for dmsetup. A device in a table is a path, \
a URI (file:, nbd:, nvme+tcp:, null:, mem:, pattern:), major:minor, or @NAME for another device. A DEVICE alone stands for a table that maps all of it. docs/targets.md \
has an example of each target and each kind of device.\n\n\
Examples:\n  udm serve --device disk=disk.img --unix /tmp/udm.sock\n  udm serve --device disk='0 2097152 linear file:disk.img 0' --unix /tmp/udm.sock\n  \
udm serve --device d='0 2097152 linear null:size=1G 0' --run 'nbdinfo $uri'\n  udm serve /etc/udm/udm.toml"
    , group = ArgGroup::new("tcp").multiple(true)
)]
pub struct ServeArgs {
    /// A configuration file with these options and the devices; docs/config.md describes it.
    /// Options of the command line override those of the file
    #[arg(value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check FILE, report errors, and serve nothing
    #[arg(long, requires = "config", conflicts_with = "fork")]
    pub check: bool,
    /// A device and its table, a file with the table, or another device to map as a whole; may be
    /// repeated
    #[arg(long = "device", value_name = "NAME=TABLE|NAME=@FILE|NAME=DEVICE", value_parser = parse_device_table_arg)]
    pub devices: Vec<DeviceTableArg>,
    /// Serve NBD on a Unix socket; - creates one in a private folder, which stays if the server is
    /// killed without --run
    #[arg(short = 'U', long, value_name = "PATH", value_parser = parse_socket_path)]
    pub unix: Option<PathBuf>,
    /// Permissions of the socket of --unix, in octal: who may write it may connect [default: 600,
    /// with
    /// --group 660]
    #[arg(long, value_name = "MODE", requires = "unix", value_parser = parse_unix_mode)]
    pub unix_mode: Option<u32>,
    /// The group of the socket of --unix, a name or a number
    #[arg(long, value_name = "GROUP", requires = "unix")]
    pub group: Option<String>,
    /// Serve NBD on a TCP port
    #[arg(short, long, value_name = "N", group = "tcp")]
    pub port: Option<u16>,
    /// An address to listen on with --port; :: means all, of IPv4 too; may be repeated
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", requires = "port")]
    pub ipaddr: Vec<std::net::IpAddr>,
    /// Serve NBD on this port of vsock too, for virtual machines of this host; they connect to
    /// nbd+vsock://2:N/NAME
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub vsock: Option<u16>,
    #[command(flatten)]
    pub clients: ClientLimitArgs,
    /// Encrypt NBD connections with TLS: off, on for clients that ask for it, require for all.
    /// Without an encrypted connection, require answers no question about exports
    #[arg(long, value_name = "off|on|require", default_value = "off", hide_possible_values = true)]
    pub tls: TlsModeArg,
    /// The folder with server-cert.pem and server-key.pem, and with --tls-verify-peer ca-cert.pem;
    /// SIGHUP reads them again
    #[arg(long, value_name = "DIR")]
    pub tls_certificates: Option<PathBuf>,
    /// Serve only clients of TLS with a certificate that ca-cert.pem has signed and ca-crl.pem, if
    /// it exists, has not revoked
    #[arg(long, requires = "tls_certificates")]
    pub tls_verify_peer: bool,
    /// Serve this device as a vhost-user-blk disk for a virtual machine on a Unix socket; may be
    /// repeated
    #[arg(long = "vhost-user", value_name = "NAME=PATH", value_parser = parse_vhost_user_disk)]
    pub vhost_user: Vec<VhostUserDiskArg>,
    /// Serve this device as a disk of this machine, /dev/ublkbN with the link /dev/udm/NAME; needs
    /// the kernel's ublk driver (Linux 6.5) and mostly root; may be repeated
    #[arg(long = "ublk", value_name = "NAME[=N]", value_parser = parse_ublk_disk)]
    pub ublk: Vec<UblkDiskArg>,
    /// Serve all devices to NVMe/TCP hosts at this address, as the namespaces of one subsystem. Any
    /// host that reaches it may use them; may be repeated
    #[arg(long, value_name = "ADDRESS:PORT", group = "tcp")]
    pub nvme: Vec<SocketAddr>,
    /// The name of that subsystem [default: one made of the name of this machine and the first
    /// address]
    #[arg(long, value_name = "NQN", requires = "nvme")]
    pub nvme_subsystem: Option<String>,
    /// Only the NVMe host of this name may connect; may be repeated. Hosts say their names, so this
    /// prevents mistakes, not attacks
    #[arg(long = "nvme-host", value_name = "NQN", requires = "nvme")]
    pub nvme_hosts: Vec<String>,
    /// The secret of an NVMe host, in a file as of nvme gen-dhchap-key: the host must prove that it
    /// knows it (DH-HMAC-CHAP); may be repeated. With it, hosts without a secret may not connect
    #[arg(long = "nvme-dhchap-secret", value_name = "HOSTNQN=FILE", requires = "nvme", value_parser = super::nvme::parse_secret_file)]
    pub nvme_dhchap_secrets: Vec<NvmeSecretFile>,
    /// The secret by which this server proves itself to that host, if the host asks; may be
    /// repeated
    #[arg(long = "nvme-dhchap-ctrl-secret", value_name = "HOSTNQN=FILE", requires = "nvme_dhchap_secrets", value_parser = super::nvme::parse_secret_file)]
    pub nvme_dhchap_ctrl_secrets: Vec<NvmeSecretFile>,
    /// The ANA state of a device, or of all (*), on one port or on all, at the start: optimized,
    /// non-optimized, inaccessible or persistent-loss; may be repeated. udm nvme ana changes it
    #[arg(long = "nvme-ana", value_name = "DEVICE[@ADDRESS:PORT]=STATE", requires = "nvme", value_parser = super::nvme::parse_ana_setting)]
    pub nvme_ana: Vec<NvmeAnaSetting>,
    /// The time in which the disks complete all requests of a host that is gone. Hosts that cannot
    /// fence their writes wait for it before they repeat them on another path. At most 65
    #[arg(long, value_name = "SECONDS", default_value_t = 30, requires = "nvme", value_parser = clap::value_parser!(u16).range(0..=65))]
    pub nvme_quiesce_time: u16,
    /// A folder that all servers of the subsystem on this machine share (mode 0700). A host that
    /// has lost one of them then learns from another one when its writes are over, and need not
    /// wait for that time
    #[arg(long, value_name = "FOLDER", requires = "nvme")]
    pub nvme_peers: Option<PathBuf>,
    /// Export only this device; may be repeated [default: all]
    #[arg(long = "export", value_name = "NAME")]
    pub exports: Vec<String>,
    /// Do not let clients write
    #[arg(short, long)]
    pub readonly: bool,
    /// Run a command through /bin/sh with $uri, $unixsocket, $uri_NAME and $UDM_SOCKET set, then
    /// shut down with its status. If the server is killed, the command with all its processes is
    /// ended, and the private folder of the sockets is removed
    #[arg(long, value_name = "CMD")]
    pub run: Option<String>,
    /// Serve the one client that is connected to standard input, and end when it disconnects
    #[arg(short, long, conflicts_with_all = ["run", "fork"])]
    pub single: bool,
    /// End, as after SIGTERM, when the program that started this server has ended
    #[arg(long, conflicts_with = "fork")]
    pub exit_with_parent: bool,
    /// Give up what the server does not need, so that who takes it over gains little: it uses only
    /// the files that the options, the file and the tables name, and few system calls. Needs a
    /// kernel with Landlock (Linux 5.13)
    #[arg(long, conflicts_with_all = ["run", "ublk"])]
    pub sandbox: bool,
    /// With --sandbox, devices that are created later may use this file, or the files in this
    /// folder; may be repeated
    #[arg(long, value_name = "PATH", requires = "sandbox")]
    pub sandbox_path: Vec<PathBuf>,
    /// Used by --sandbox: the restrictions are in force
    #[arg(long, hide = true)]
    pub sandboxed: bool,
    /// Used by vhost-user-blk --fd: serve the machine at the other end of this open socket until it
    /// disconnects
    #[arg(long = "vhost-user-fd", value_name = "NAME=FD", value_parser = parse_vhost_user_fd, hide = true)]
    pub vhost_user_fd: Option<VhostUserFdArg>,
    /// The CPUs to use, one core each (0-3, 0,2) [default: one core per CPU, at most 8, not pinned]
    #[arg(long, value_name = "LIST")]
    pub cores: Option<CpuList>,
    /// Poll for requests without sleeping
    #[arg(long)]
    pub poll: bool,
    /// Check the paths of multipath devices at this interval (1 to 3600), and up to 4 times as long
    /// for working paths; fail paths that do not answer, and reinstate those that do. off: paths
    /// fail by I/O errors and messages only, as with a kernel without multipathd [default: 5]
    #[arg(long, value_name = "SECONDS|off")]
    pub check_paths: Option<PathCheckInterval>,
    /// Maintain paths as this multipath.conf says; docs/multipath.md lists its keys
    #[arg(long, value_name = "FILE")]
    pub multipath_conf: Option<PathBuf>,
    /// Fail a path of a multipath device that answers nothing for this long though a request is
    /// pending, or keeps one request four times as long. Its reads are sent to other paths; its
    /// writes wait (0.01 to 3600) [default: no deadline]
    #[arg(long, value_name = "SECONDS", value_parser = parse_path_deadline)]
    pub path_deadline: Option<Duration>,
    /// Send a read of a multipath device that takes longer than most also to a second path, for at
    /// most one read in twenty
    #[arg(long)]
    pub hedge_reads: bool,
    /// Eject a path of a multipath device for a while if its reads take much longer than those of
    /// the other paths of its group
    #[arg(long)]
    pub eject_slow_paths: bool,
    /// Queue depth of request-based multipath devices (queue_mode other than bio): the tags of each
    /// hardware queue, 0 for 2048, at most 10240. Such devices have a queue only with this or the
    /// next option
    #[arg(long = "dm_mq_queue_depth", value_name = "N")]
    pub dm_mq_queue_depth: Option<u32>,
    /// Number of hardware queues of these devices: 0 for 1, at most 32 and at most one per core
    #[arg(long = "dm_mq_nr_hw_queues", value_name = "N")]
    pub dm_mq_nr_hw_queues: Option<u32>,
    /// How to serve a disk with a persistent snapshot that cannot be attached because its store is
    /// missing: refuse does not serve it, wait serves it once the store is back, give-up serves it
    /// at once and the snapshot is lost
    #[arg(long, value_name = "refuse|wait|give-up", default_value = "refuse", hide_possible_values = true)]
    pub lost_snapshots: LostSnapshotsArg,
    /// When all of a clone is copied, replace its table by a linear one over its destination, as
    /// udm clone finish does
    #[arg(long)]
    pub clone_finish: bool,
    /// Serve in the background, and return when the devices are served; the log goes to standard
    /// error if that is a file
    #[arg(long, conflicts_with = "run")]
    pub fork: bool,
    /// Write the server's process ID to a file when the devices are served, and remove the file at
    /// the end
    #[arg(short = 'P', long, value_name = "FILE")]
    pub pidfile: Option<PathBuf>,
    /// Used by vhost-user-blk, of which many run beside each other: a control socket in a private
    /// folder
    #[arg(long, hide = true)]
    pub private_control_socket: bool,
    /// Used by --fork: report readiness on standard output
    #[arg(long, hide = true)]
    pub ready_on_stdout: bool,
    /// Used by udm upgrade: take over from the server at the other end of standard input
    #[arg(long, hide = true)]
    pub take_over_on_stdin: bool,
    /// How long a shutdown after a signal may take; after that udm reports what it abandons and
    /// exits with status 1
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub stop_timeout: u64,
    /// The control socket [default: as for the other verbs; with --run a private one]
    #[arg(long, value_name = "PATH", value_parser = parse_socket_path)]
    pub socket: Option<PathBuf>,
    /// Let this group, a name or a number, use the verbs of the control socket that change nothing
    #[arg(long, value_name = "GROUP")]
    pub control_group: Option<String>,
    /// Serve /metrics, and nothing else, on this TCP port too. Whoever reaches it can read them
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics: Option<SocketAddr>,
    #[command(flatten)]
    pub state: StateFolderArgs,
}

impl ServeArgs {
    /// The options alone, without the verbs around them.
    pub fn command() -> Command {
        let mut serve = ServeArgs::augment_args(Command::new("serve"));
        serve.build();
        serve
    }

    /// True if an option names a machine, a block device or an address for hosts.
    pub fn has_disks(&self) -> bool {
        !self.vhost_user.is_empty()
            || self.vhost_user_fd.is_some()
            || !self.ublk.is_empty()
            || !self.nvme.is_empty()
    }

    /// True if NBD is served on a port of TCP or vsock.
    pub fn has_port(&self) -> bool {
        self.port.is_some() || self.vsock.is_some()
    }

    /// True if an option or a file says where to serve, or inherited sockets do.
    pub fn has_listen_args(&self) -> bool {
        let is_named = self.config.is_some() || self.unix.is_some() || self.has_port() || self.run.is_some();
        let has_disks = self.has_disks();
        let is_inherited = std::env::var_os("LISTEN_FDS").is_some() || self.take_over_on_stdin;
        is_named || has_disks || is_inherited || self.single
    }
}

/// Parses a value of `--vhost-user`.
fn parse_vhost_user_disk(word: &str) -> Result<VhostUserDiskArg, String> {
    match word.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => {
            Ok(VhostUserDiskArg { name: name.to_owned(), path: parse_socket_path(path)? })
        }
        _ => Err("expected NAME=PATH: a device, and a path for its socket".into()),
    }
}

/// Parses a value of `--vhost-user-fd`.
fn parse_vhost_user_fd(word: &str) -> Result<VhostUserFdArg, String> {
    let (name, fd) = word.split_once('=').ok_or("expected NAME=FD")?;
    // Standard streams are no sockets for a machine.
    let fd = fd.parse().ok().filter(|fd| *fd > 2).ok_or("expected the number of an open socket, above 2")?;
    Ok(VhostUserFdArg { name: name.to_owned(), fd })
}

/// Parses a value of `--ublk`.
fn parse_ublk_disk(word: &str) -> Result<UblkDiskArg, String> {
    let (name, number) = match word.split_once('=') {
        Some((name, number)) => {
            let number = number.parse().ok().filter(|number| *number <= NUMBER_MAX);
            (name, Some(number.ok_or(format!("expected NAME or NAME=N, with N in 0..={NUMBER_MAX}"))?))
        }
        None => (word, None),
    };
    match name {
        "" => Err("expected NAME or NAME=N: a device, and a number for /dev/ublkbN".into()),
        _ => Ok(UblkDiskArg { name: name.to_owned(), number }),
    }
}

/// Parses the deadline of a path, in seconds.
fn parse_path_deadline(word: &str) -> Result<Duration, String> {
    let range = Duration::from_millis(10)..=Duration::from_secs(3600);
    parse_seconds(word)
        .and_then(|d| if range.contains(&d) { Ok(d) } else { Err("not in 0.01..=3600".into()) })
}
