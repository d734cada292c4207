//! Limits of requests and bytes per second in the files: a device may name a group of any file.

use std::collections::BTreeMap;
use udm_control::config::DesiredDevice;
use udm_control::throttle_settings::ThrottleSettings;
use udm_wire::throttle::ThrottleLimits;
use udm_wire::udm_conf::{DeviceThrottleConf, ThrottleGroupConf, UdmConfError};

/// The groups and limits of the files that were read until now.
#[derive(Default)]
pub(super) struct ThrottlesOfFiles {
    /// Limits of the groups, and the files that have them.
    groups: BTreeMap<String, (ThrottleLimits, String)>,
    /// Devices of groups, by their index, with the error if there is no such group.
    members: Vec<(usize, String, anyhow::Error)>,
}

impl ThrottlesOfFiles {
    /// Adds a group of `file`.
    ///
    /// # Errors
    /// Another file has the group.
    pub fn add_group(&mut self, group: ThrottleGroupConf, file: &str) -> Result<(), UdmConfError> {
        let ThrottleGroupConf { name, limits, at } = group;
        match self.groups.insert(name.clone(), (limits, file.to_owned())) {
            None => Ok(()),
            Some((_, other)) => {
                Err(UdmConfError::new(format!("throttle-groups: {name}: {other} has it too"), at))
            }
        }
    }

    /// The limits of the device `name`, which has this index, if they are its own. Those of a group
    /// are set by [`ThrottlesOfFiles::set_groups`]. `shown` adds the place to an error.
    pub fn limits_of_device(
        &mut self,
        (index, name): (usize, &str),
        throttle: Option<DeviceThrottleConf>,
        shown: impl Fn(&UdmConfError) -> anyhow::Error,
    ) -> Option<ThrottleSettings> {
        match throttle? {
            DeviceThrottleConf::Limits(limits) => {
                Some(ThrottleSettings { limits: limits.to_string(), group: None })
            }
            DeviceThrottleConf::Group(group, at) => {
                let why =
                    format!("devices.{name}: throttle-group: there is no {group:?} in [throttle-groups]");
                self.members.push((index, group, shown(&UdmConfError::new(why, at))));
                None
            }
        }
    }

    /// Sets the limits of the devices that name a group, once all files are read.
    ///
    /// # Errors
    /// The first device whose group no file has.
    pub fn set_groups(self, devices: &mut [DesiredDevice]) -> anyhow::Result<()> {
        for (index, group, missing) in self.members {
            let Some((limits, _)) = self.groups.get(&group) else { return Err(missing) };
            devices[index].throttle =
                Some(ThrottleSettings { limits: limits.to_string(), group: Some(group) });
        }
        Ok(())
    }
}
