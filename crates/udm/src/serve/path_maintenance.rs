//! Maintenance of multipath devices: `--check-paths`, `--multipath-conf`, and the options of the
//! path watch.

use super::args::ServeArgs;
use anyhow::{Context, Result, bail};
use std::io::Read;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use udm_control::registry::{PathMaintenanceFn, PathMaintenanceSettings, PathWatchOptions};
use udm_core::Nanos;
use udm_wire::multipath_conf::{CONF_MAX, MultipathConf};

/// The check interval of paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathCheckInterval {
    /// Paths are not checked.
    Off,
    /// The first interval in seconds; intervals of working paths become longer.
    Every(u64),
}

impl FromStr for PathCheckInterval {
    type Err = String;
    fn from_str(word: &str) -> Result<PathCheckInterval, String> {
        match (word, word.parse()) {
            ("off", _) => Ok(PathCheckInterval::Off),
            (_, Ok(seconds @ 1..=3600)) => Ok(PathCheckInterval::Every(seconds)),
            _ => Err("neither off nor seconds in 1..=3600".into()),
        }
    }
}

/// The maintenance policy: settings for a device by its names.
pub fn maintenance_policy_from_args(args: &ServeArgs) -> Result<PathMaintenanceFn> {
    let (off, every) = match args.check_paths {
        Some(PathCheckInterval::Off) => (true, None),
        Some(PathCheckInterval::Every(seconds)) => (false, Some(seconds)),
        None => (false, None),
    };
    let conf = match &args.multipath_conf {
        Some(_) if off => {
            bail!("--multipath-conf and --check-paths off exclude each other")
        }
        Some(file) => Some(read_multipath_conf(file)?),
        None => (!off).then(MultipathConf::default),
    };
    let watch = PathWatchOptions {
        deadline: args.path_deadline.map(|d| Nanos(d.as_nanos() as u64)),
        hedge_reads: args.hedge_reads,
        eject_slow: args.eject_slow_paths,
    };
    let of = move |name: &str, uuid: Option<&str>| {
        let settings = conf.as_ref().map(|conf| conf.settings(name, uuid, every));
        PathMaintenanceSettings { paths: settings.map(Arc::new), watch }
    };
    Ok(Box::new(of))
}

/// Reads a `multipath.conf`; ignored settings are logged.
fn read_multipath_conf(file: &Path) -> Result<MultipathConf> {
    let name = file.display().to_string();
    let mut text = String::new();
    let open = std::fs::File::open(file).with_context(|| name.clone())?;
    open.take(CONF_MAX as u64 + 1).read_to_string(&mut text).with_context(|| name.clone())?;
    match MultipathConf::parse(&text) {
        Ok(conf) => {
            conf.warnings.iter().for_each(|warning| tracing::warn!("{name}: {warning}"));
            Ok(conf)
        }
        Err(why) => bail!("{name}: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::FromArgMatches as _;

    /// The first check interval in seconds; `None` if paths are not checked.
    fn every(options: &[&str]) -> Result<Option<u64>, String> {
        let words = ["serve", "--unix", "-"].iter().chain(options);
        let matches = ServeArgs::command().try_get_matches_from(words).map_err(|e| e.to_string())?;
        let args = ServeArgs::from_arg_matches(&matches).map_err(|e| e.to_string())?;
        let maintenance = maintenance_policy_from_args(&args).map_err(|e| e.to_string())?("mp", None);
        Ok(maintenance.paths.map(|paths| paths.polling_interval.0 / 1_000_000_000))
    }

    #[test]
    fn paths_are_checked_unless_somebody_says_no() {
        assert_eq!(every(&[]), Ok(Some(5)));
        assert_eq!(every(&["--check-paths", "2"]), Ok(Some(2)));
        assert_eq!(every(&["--check-paths", "off"]), Ok(None));
        for word in ["0", "3601", "no", "1.5", ""] {
            assert!(every(&["--check-paths", word]).is_err(), "{word}");
        }
        let both = every(&["--check-paths", "off", "--multipath-conf", "mp.conf"]).unwrap_err();
        assert!(both.starts_with("--multipath-conf and"), "{both}");
    }
}
