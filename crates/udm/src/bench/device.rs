//! Opens the devices to measure, from the words of the command line.

use super::file;
use crate::table_arg::TableArg;
use crate::verbs::read_table;
use anyhow::{Context, Result};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use udm_bench::{JobDevice, MappedDevices, NamedTable};
use udm_core::Device;
use udm_runtime::CoreSet;
use udm_wire::uri::{self, DeviceUri};

/// The value of one `--device`.
#[derive(Debug, PartialEq, Eq)]
enum DeviceSource {
    NamedTable { name: String, table: TableArg },
    Uri(DeviceUri),
}

/// Opens the device of each job in `jobs`, or the last device of `words` if a job names none.
/// Also returns all mapped devices. The other devices of `words` are for use in tables.
///
/// # Errors
/// One line with the device and the reason; for a table, a caret marks the word.
pub fn open_devices(
    core_set: &Arc<CoreSet>,
    words: &[String],
    jobs: &[JobDevice],
    stop: &AtomicBool,
) -> Result<(Vec<Arc<dyn Device>>, MappedDevices)> {
    let mut tables = Vec::new();
    let mut last = None;
    for word in words {
        last = Some(device_uri_of(word, &mut tables)?);
    }
    let prepare = |job: &JobDevice| {
        let uri = match &job.filename {
            Some(word) => device_uri_of(word, &mut tables)?,
            None => last.clone().context("bench: no device")?,
        };
        if let DeviceUri::Mapped(_) = uri {
            tables.iter().try_for_each(|table| file::check_table(&table.text, job.direct))?;
        }
        file::prepare_file(uri, job, stop)
    };
    let jobs = jobs.iter().map(prepare).collect::<Result<Vec<_>>>().context("bench")?;
    let mapped = MappedDevices::new(core_set, &tables)?;
    let open = |uri: DeviceUri| match uri {
        DeviceUri::Mapped(name) => {
            let at = tables.iter().position(|t| t.name == name);
            let at = at.with_context(|| format!("@{name}: no --device of that name"))?;
            Ok(Arc::clone(&mapped.devices[at]))
        }
        uri => udm_backends::open(&uri).map_err(|error| open_error(&uri, error.into())),
    };
    let devices = jobs.into_iter().map(open).collect::<Result<Vec<_>>>()?;
    Ok((devices, mapped))
}

/// Explains why a device cannot be opened. For a file system without `O_DIRECT` the kernel only
/// says "Invalid argument".
fn open_error(uri: &DeviceUri, error: anyhow::Error) -> anyhow::Error {
    match uri {
        DeviceUri::File(file)
            if file.direct == Some(true) && format!("{error:#}").contains("Invalid argument") =>
        {
            error.context("direct=1: the file system does not support O_DIRECT")
        }
        _ => error,
    }
}

/// Resolves a word of the command line; a device with a table is added to `tables`.
fn device_uri_of(word: &str, tables: &mut Vec<NamedTable>) -> Result<DeviceUri> {
    let (name, table) = match parse_device_source(word)? {
        DeviceSource::Uri(uri) => return Ok(uri),
        DeviceSource::NamedTable { name, table } => (name, table),
    };
    let text = match table {
        TableArg::Text(text) => text,
        TableArg::Whole(word) => whole_device_table(&word).with_context(|| name.clone())?,
        TableArg::File(file) => read_table(&file).with_context(|| name.clone())?,
    };
    tables.push(NamedTable { name: name.clone(), text });
    Ok(DeviceUri::Mapped(name))
}

/// A table that maps all of a device.
fn whole_device_table(word: &str) -> Result<String> {
    let sectors = udm_backends::open(&uri::parse(word)?)?.limits().size.0;
    Ok(format!("0 {sectors} linear {} 0", udm_wire::words::escape(word)))
}

/// Parses `NAME=TABLE`, `NAME=@FILE`, `NAME=DEVICE`, or a URI or path. A name contains no character
/// of a URI or a path. If a file with this path exists, the word is a path.
fn parse_device_source(word: &str) -> Result<DeviceSource> {
    if let Some((name, table)) = word.split_once('=')
        && !name.is_empty()
        && !name.contains([':', '/', '?'])
        && !Path::new(word).exists()
    {
        let table = match table.strip_prefix('@') {
            Some(file) => TableArg::File(file.into()),
            None if table.contains(char::is_whitespace) => TableArg::Text(table.to_owned()),
            None => TableArg::Whole(table.to_owned()),
        };
        return Ok(DeviceSource::NamedTable { name: name.to_owned(), table });
    }
    Ok(DeviceSource::Uri(uri::parse(word).with_context(|| format!("--device {word}"))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_and_uris_are_told_apart() {
        for table in ["d=0 8 zero", "d=\t0 8 linear null:size=1M 0", "d=0 8 linear /a 0"] {
            let (name, text) = table.split_once('=').unwrap();
            let want = DeviceSource::NamedTable { name: name.into(), table: TableArg::Text(text.into()) };
            assert_eq!(parse_device_source(table).unwrap(), want);
        }
        let file = DeviceSource::NamedTable { name: "d".into(), table: TableArg::File("/x".into()) };
        assert_eq!(parse_device_source("d=@/x").unwrap(), file);
        let whole =
            DeviceSource::NamedTable { name: "d".into(), table: TableArg::Whole("null:size=1M".into()) };
        assert_eq!(parse_device_source("d=null:size=1M").unwrap(), whole);
        for word in ["null:size=1M", "mem:1G", "/tmp/a=b c", "file:a=b%20c?direct=on", "@d"] {
            assert!(matches!(parse_device_source(word).unwrap(), DeviceSource::Uri(_)), "{word}");
        }
        assert!(parse_device_source("nul:1").is_err());
    }

    #[test]
    fn a_name_that_no_device_has() {
        let core_set = CoreSet::new(1).unwrap();
        let none = JobDevice { filename: None, direct: None, bytes: 0, is_read: true };
        let error =
            open_devices(&core_set, &["@d".into()], &[none], &AtomicBool::new(false)).err().expect("refused");
        assert_eq!(format!("{error:#}"), "@d: no --device of that name");
    }
}
