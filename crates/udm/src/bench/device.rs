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
use udm_runtime::ProcessCores;
use udm_wire::uri::{self, DeviceUri};

/// The value of one `--device`.
#[derive(Debug, PartialEq, Eq)]
enum BenchDeviceArg {
    NamedTable { name: String, table: TableArg },
    Uri(DeviceUri),
}

/// Opens the device of each job in `jobs`, or the last device of `words` if a job names none.
/// Also returns all mapped devices. The other devices of `words` are for use in tables.
///
/// # Errors
/// One line with the device and the reason; for a table, a caret marks the word.
pub fn open_bench_job_devices(
    core_set: &Arc<ProcessCores>,
    words: &[String],
    jobs: &[JobDevice],
    stop: &AtomicBool,
) -> Result<(Vec<Arc<dyn Device>>, MappedDevices)> {
    let mut tables = Vec::new();
    let mut last = None;
    for word in words {
        last = Some(resolve_bench_device_arg(word, &mut tables)?);
    }
    let prepare = |job: &JobDevice| {
        let uri = match &job.filename {
            Some(word) => resolve_bench_device_arg(word, &mut tables)?,
            None => last.clone().context("bench: no device")?,
        };
        if let DeviceUri::Mapped(_) = uri {
            tables
                .iter()
                .try_for_each(|table| file::refuse_direct_for_cached_file(&table.text, job.direct))?;
        }
        file::lay_out_bench_job_file(uri, job, stop)
    };
    let jobs = jobs.iter().map(prepare).collect::<Result<Vec<_>>>().context("bench")?;
    let mapped = MappedDevices::new(core_set, &tables)?;
    let open = |uri: DeviceUri| match uri {
        DeviceUri::Mapped(name) => {
            let at = tables.iter().position(|t| t.name == name);
            let at = at.with_context(|| format!("@{name}: no --device of that name"))?;
            Ok(Arc::clone(&mapped.devices[at]))
        }
        uri => udm_backends::open_standalone_device(&uri)
            .map_err(|error| explain_device_open_error(&uri, error.into())),
    };
    let devices = jobs.into_iter().map(open).collect::<Result<Vec<_>>>()?;
    Ok((devices, mapped))
}

/// Explains why a device cannot be opened. For a file system without `O_DIRECT` the kernel only
/// says "Invalid argument".
fn explain_device_open_error(uri: &DeviceUri, error: anyhow::Error) -> anyhow::Error {
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
fn resolve_bench_device_arg(word: &str, tables: &mut Vec<NamedTable>) -> Result<DeviceUri> {
    let (name, table) = match parse_bench_device_arg(word)? {
        BenchDeviceArg::Uri(uri) => return Ok(uri),
        BenchDeviceArg::NamedTable { name, table } => (name, table),
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
    let sectors = udm_backends::open_standalone_device(&uri::parse_device_uri(word)?)?.limits().size.0;
    Ok(format!("0 {sectors} linear {} 0", udm_wire::words::escape_table_word(word)))
}

/// Parses `NAME=TABLE`, `NAME=@FILE`, `NAME=DEVICE`, or a URI or path. A name contains no character
/// of a URI or a path. If a file with this path exists, the word is a path.
fn parse_bench_device_arg(word: &str) -> Result<BenchDeviceArg> {
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
        return Ok(BenchDeviceArg::NamedTable { name: name.to_owned(), table });
    }
    Ok(BenchDeviceArg::Uri(uri::parse_device_uri(word).with_context(|| format!("--device {word}"))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_and_uris_are_told_apart() {
        for table in ["d=0 8 zero", "d=\t0 8 linear null:size=1M 0", "d=0 8 linear /a 0"] {
            let (name, text) = table.split_once('=').unwrap();
            let want = BenchDeviceArg::NamedTable { name: name.into(), table: TableArg::Text(text.into()) };
            assert_eq!(parse_bench_device_arg(table).unwrap(), want);
        }
        let file = BenchDeviceArg::NamedTable { name: "d".into(), table: TableArg::File("/x".into()) };
        assert_eq!(parse_bench_device_arg("d=@/x").unwrap(), file);
        let whole =
            BenchDeviceArg::NamedTable { name: "d".into(), table: TableArg::Whole("null:size=1M".into()) };
        assert_eq!(parse_bench_device_arg("d=null:size=1M").unwrap(), whole);
        for word in ["null:size=1M", "mem:1G", "/tmp/a=b c", "file:a=b%20c?direct=on", "@d"] {
            assert!(matches!(parse_bench_device_arg(word).unwrap(), BenchDeviceArg::Uri(_)), "{word}");
        }
        assert!(parse_bench_device_arg("nul:1").is_err());
    }

    #[test]
    fn a_name_that_no_device_has() {
        let core_set = ProcessCores::new(1).unwrap();
        let none = JobDevice { filename: None, direct: None, bytes: 0, is_read: true };
        let error = open_bench_job_devices(&core_set, &["@d".into()], &[none], &AtomicBool::new(false))
            .err()
            .expect("refused");
        assert_eq!(format!("{error:#}"), "@d: no --device of that name");
    }
}
