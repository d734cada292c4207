//! What crosses the control socket, as plain structs. Sizes are in bytes, times in nanoseconds, names are stable.

use super::schema::api;

api! {
    /// A mapped device.
    reply Device {
        /// Its name.
        name: String,
        /// Its uuid, when it has one.
        uuid: Option<String>,
        /// Its number, major:minor, in udm's own numbering.
        number: String,
        /// The size of its live table; 0 without one.
        size_bytes: u64,
        /// "active" or "suspended".
        state: String,
        /// It has a live table.
        live_table: bool,
        /// It has a loaded table that waits for a resume.
        inactive_table: bool,
        /// Connections of clients, and tables of other devices that use it.
        open_count: u64,
        /// How many events it has raised.
        event_nr: u32,
        /// Targets in the live table.
        targets: u64,
        /// Writes fail.
        read_only: bool,
    }

    /// All mapped devices, in the order of their numbers.
    reply DeviceList {
        /// The devices.
        devices: Vec<Device>,
    }

    /// One line of a table or of a status.
    reply Line {
        /// Where the target starts on the device.
        start_bytes: u64,
        /// How long it is.
        length_bytes: u64,
        /// The type of the target.
        target: String,
        /// The rest of the line, byte for byte as the kernel prints it.
        params: String,
    }

    /// A device that a table uses.
    reply Below {
        /// Its number, as it stands in the table.
        number: String,
        /// Its URI, or @ and the name of a mapped device.
        uri: String,
    }

    /// A table.
    reply Table {
        /// The name of the device.
        name: String,
        /// The table as dmsetup prints it; empty without one.
        text: String,
        /// The same, a target a line.
        lines: Vec<Line>,
        /// The devices that it uses.
        devices: Vec<Below>,
    }

    /// The status of a table.
    reply Status {
        /// The name of the device.
        name: String,
        /// The status as dmsetup prints it; empty without a table.
        text: String,
        /// The same, a target a line.
        lines: Vec<Line>,
        /// How many events the device has raised.
        event_nr: u32,
    }

    /// A device to make. With a table it is loaded and resumed, as dmsetup create does; without one the device has none.
    request Create {
        /// Its name: 1 to 127 bytes, without a slash.
        name: String,
        /// Its uuid: at most 128 bytes.
        uuid: Option<String>,
        /// The table, a target a line, at most 1 MiB.
        table: Option<String>,
        /// The absolute path of the folder from which relative paths in the table count. Without it they are refused.
        folder: Option<String>,
    }

    /// A table to load into the inactive slot.
    request Load {
        /// The table, a target a line, at most 1 MiB.
        table: String,
        /// The absolute path of the folder from which relative paths in the table count. Without it they are refused.
        folder: Option<String>,
    }

    /// A message to a target.
    request Message {
        /// A sector (of 512 bytes) inside the target.
        sector: u64,
        /// The words of the message.
        message: String,
        /// The absolute path of the folder from which relative paths in the message count. Without it they are refused.
        folder: Option<String>,
    }

    /// What a target answered.
    reply Answer {
        /// The answer; empty for most messages.
        answer: String,
    }

    /// How to suspend.
    request Suspend {
        /// Do not wait for requests that targets hold back: they wait for the resume, perhaps through another table.
        noflush: Option<bool>,
        /// Call it off when it takes longer than so many milliseconds: the device is active then.
        timeout_ms: Option<u64>,
    }

    /// How to resume.
    request Resume {
        /// Call it off when it takes longer than so many milliseconds: the table that was live is live and running then.
        timeout_ms: Option<u64>,
    }

    /// Which devices to suspend together: all of them or none.
    request SuspendTogether {
        /// Their names.
        names: Vec<String>,
        /// Do not wait for requests that targets hold back: they wait for the resume, perhaps through another table.
        noflush: Option<bool>,
        /// Call it off when it takes longer than so many milliseconds: the devices are active then.
        timeout_ms: Option<u64>,
    }

    /// Which devices to resume together: all of them or none.
    request ResumeTogether {
        /// Their names.
        names: Vec<String>,
        /// Call it off when it takes longer than so many milliseconds: the tables that were live are live and running then.
        timeout_ms: Option<u64>,
    }

    /// Where an export can be reached.
    reply Export {
        /// Its name, which is the device's.
        name: String,
        /// Its size.
        size_bytes: u64,
        /// Writes are refused.
        read_only: bool,
        /// The NBD URIs under which clients reach it.
        uris: Vec<String>,
    }

    /// All exports.
    reply ExportList {
        /// The exports.
        exports: Vec<Export>,
    }

    /// A type of target.
    reply TargetVersion {
        /// Its name, as tables spell it.
        name: String,
        /// Its version, as the kernel counts it.
        version: String,
    }

    /// What this server is.
    reply Version {
        /// The version of udm.
        version: String,
        /// The version of the kernel's device mapper whose behaviour it follows.
        driver_version: String,
        /// The types of target that it has.
        targets: Vec<TargetVersion>,
    }

    /// Why a request was refused.
    reply Error {
        /// The whole story in one line.
        error: String,
        /// The errno.
        errno: u32,
        /// The kernel's text, where the kernel has one.
        text: String,
        /// The precise reason, where the kernel's text hides it.
        reason: String,
        /// The line of the table to blame, from 1.
        line: Option<u64>,
        /// The first character to blame in that line, from 1.
        column: Option<u64>,
        /// How many characters to blame.
        width: Option<u64>,
    }
}
