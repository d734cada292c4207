//! Mapped devices over the devices of [`super::models`], which no table can name.

use anyhow::{Context, Result, anyhow};
use std::sync::Arc;
use udm_core::{CoreCommandSender, DevNo, Device};
use udm_dm::testing::{TestControlIo, TestDeviceNameResolver};
use udm_dm::{MappedDevice, Table};
use udm_targets::TARGETS;

/// Makes a mapped device with this table on `cores`. The table refers to `disks` as `253:0`,
/// `253:1` and so on. `turn` is called until the cores have processed the resume.
pub(super) fn make_mapped_device_over_disks(
    cores: &dyn CoreCommandSender,
    core_count: usize,
    table: &str,
    disks: &[Arc<dyn Device>],
    mut turn: impl FnMut(),
) -> Result<Arc<MappedDevice>> {
    let mut resolver = TestDeviceNameResolver::new();
    for (minor, disk) in (0..).zip(disks) {
        let number = DevNo { major: 253, minor };
        resolver.add(&number.to_string(), number, Arc::clone(disk));
    }
    let lines = udm_wire::table::parse_table(table)?;
    let table = Table::build(TARGETS, &lines, &mut resolver, &TestControlIo::new(), core_count)
        .map_err(|why| anyhow!("{table}: {why:?}"))?;
    let device = MappedDevice::new("lab", None, DevNo { major: 254, minor: 0 }).context("a device")?;
    device.load(table).context("its table")?;
    let mut change = device.resume(Arc::new(|| ())).context("a resume")?;
    loop {
        match change.step(cores) {
            Some(over) => return over.context("a resume").map(|()| device),
            None => turn(),
        }
    }
}
