//! What is done for multipath devices: `--check-paths` and `--multipath-conf`, and what their paths
//! are watched for.

use crate::cli::ServeArgs;
use anyhow::{Context, Result, bail};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use udm_control::registry::UpkeepOf;
use udm_core::Nanos;
use udm_dm::{PathWatch, Upkeep};
use udm_wire::multipath_conf::{CONF_MAX, Conf};

/// What is done for a device by its names.
pub fn of(args: &ServeArgs) -> Result<UpkeepOf> {
    let every = args.check_paths;
    let conf = match &args.multipath_conf {
        Some(file) => Some(read(file)?),
        None => every.map(|_| Conf::default()),
    };
    let watch = PathWatch {
        deadline: args.path_deadline.map(|d| Nanos(d.as_nanos() as u64)),
        hedge_reads: args.hedge_reads,
        eject_slow: args.eject_slow_paths,
    };
    let of = move |name: &str, uuid: Option<&str>| {
        let settings = conf.as_ref().map(|conf| conf.settings(name, uuid, every));
        Upkeep { paths: settings.map(Arc::new), watch }
    };
    Ok(Box::new(of))
}

/// A `multipath.conf`; what it says that is passed over goes to the log.
fn read(file: &Path) -> Result<Conf> {
    let name = file.display().to_string();
    let mut text = String::new();
    let open = std::fs::File::open(file).with_context(|| name.clone())?;
    open.take(CONF_MAX as u64 + 1).read_to_string(&mut text).with_context(|| name.clone())?;
    match Conf::parse(&text) {
        Ok(conf) => {
            conf.warnings.iter().for_each(|warning| tracing::warn!("{name}: {warning}"));
            Ok(conf)
        }
        Err(why) => bail!("{name}: {why}"),
    }
}
