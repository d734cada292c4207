//! The list of planted bugs, and the simulated world that finds each.

/// A kind of world of the simulator in which a bug shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimWorldKind {
    /// Mapped devices with their tables and paths.
    Devices,
    /// Mapped devices over disks that have the faults of null devices.
    Faults,
    /// Origins and their snapshots.
    Snapshots,
    /// The NBD server and its clients.
    Nbd,
    /// The registry and its verbs.
    Verbs,
    /// The NBD client and its servers.
    NbdClient,
    /// Servers that run one after another over the same disks and state folder.
    Lives,
    /// Disks of virtual machines.
    VhostUser,
    /// A clone of a source.
    Clones,
    /// A clone of an object of a server that lies.
    Objects,
    /// A mirror that is switched to its destination.
    Mirrors,
    /// The NVMe/TCP target and its hosts.
    Nvme,
    /// The NVMe/TCP initiator, against model targets and udm's own.
    NvmeClient,
    /// A mirror that continues from its log.
    MirrorLogs,
}

/// Generates `Bug` and `Bug::ALL` from one list.
macro_rules! bugs {
    ($($(#[$what:meta])* $bug:ident: $world:ident,)*) => {
        /// A planted bug.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Bug {
            $($(#[$what])* $bug,)*
        }

        impl Bug {
            /// All bugs, each with the kind of world in which it shows.
            pub const ALL: &[(Bug, SimWorldKind)] = &[$((Bug::$bug, SimWorldKind::$world),)*];
        }
    };
}

impl Bug {
    /// Finds a bug by its name in the source.
    ///
    /// # Errors
    /// If no bug has this name. The error lists all names.
    pub fn find(name: &str) -> Result<Bug, String> {
        // LLVM takes minutes to optimise a chain of iterators that compares the names.
        let names: Vec<String> = Bug::ALL.iter().map(|(bug, _)| format!("{bug:?}")).collect();
        match names.iter().position(|n| n == name) {
            Some(i) => Ok(Bug::ALL[i].0),
            None => Err(format!("no bug {name:?}; the bugs are {}", names.join(", "))),
        }
    }
}

/// Joins the lists of the files below to one.
macro_rules! collect_bugs {
    ({$($all:tt)*}) => { bugs! { $($all)* } };
    ({$($all:tt)*} $list:ident $($next:ident)*) => { $list! { {$($all)*} $($next)* } };
}

#[macro_use]
mod copies;
#[macro_use]
mod devices;
#[macro_use]
mod front_ends;
#[macro_use]
mod nvme;
#[macro_use]
mod snapshots;

collect_bugs! { {} devices_bugs snapshots_bugs front_ends_bugs nvme_bugs copies_bugs }
