//! A device on the command line: its name and the source of its table.

use std::path::PathBuf;

/// The value of `--device`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceTableArg {
    /// The name of the device.
    pub name: String,
    /// The table of the device.
    pub table: TableArg,
}

/// The source of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TableArg {
    /// The table itself.
    Text(String),
    /// A file that holds the table.
    File(PathBuf),
    /// Another device, to be mapped as a whole.
    Whole(String),
}

/// Parses `NAME=TABLE`, `NAME=@FILE` or `NAME=DEVICE`.
pub fn parse_device_table_arg(text: &str) -> Result<DeviceTableArg, String> {
    let (name, table) = text
        .split_once('=')
        .ok_or("expected NAME=TABLE, NAME=@FILE or NAME=DEVICE, such as disk=disk.img")?;
    if name.is_empty() {
        return Err("the name is missing".into());
    }
    let table = match table.strip_prefix('@') {
        Some("") => return Err("the file is missing".into()),
        Some(file) => TableArg::File(file.into()),
        None if udm_wire::table::is_table_not_device_name(table) => TableArg::Text(table.into()),
        None => TableArg::Whole(table.into()),
    };
    Ok(DeviceTableArg { name: name.into(), table })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices() {
        let arg = parse_device_table_arg("d=0 8 linear file:x?direct=on 0").unwrap();
        assert_eq!(
            (arg.name.as_str(), arg.table),
            ("d", TableArg::Text("0 8 linear file:x?direct=on 0".into()))
        );
        for device in ["disk.img", "my disk.img", "/dev/sda", "mem:1G", "253:0", "file:x?direct=on"] {
            let whole = TableArg::Whole(device.into());
            assert_eq!(parse_device_table_arg(&format!("d={device}")).unwrap().table, whole);
        }
        for table in ["0 8 zero", " 0 8 zero", "", "0", "# none\n", "a\nb", "0\t8 zero"] {
            let text = TableArg::Text(table.into());
            assert_eq!(parse_device_table_arg(&format!("d={table}")).unwrap().table, text);
        }
        assert_eq!(parse_device_table_arg("d=@/etc/t").unwrap().table, TableArg::File("/etc/t".into()));
        for bad in ["", "d", "=0 8 error", "d=@"] {
            assert!(parse_device_table_arg(bad).is_err(), "{bad}");
        }
    }
}
