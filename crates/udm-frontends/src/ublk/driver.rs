//! Control commands to the ublk driver, with time limits and errors that say what to do.

use rustix::io::Errno;
use std::fmt;
use std::io;
use std::time::Duration;
use udm_runtime::{UblkControl, UblkDevice};
use udm_wire::ublk::{
    DEVICE_INFO_SIZE, PARAMS_SIZE, UblkControlCommand, UblkControlHeader, UblkDeviceInfo, UblkFeatures,
    UblkParams,
};

/// Time limit of commands that only read or change the driver's data.
const LIMIT: Duration = Duration::from_secs(10);

/// Time limit of the start: the kernel reads the partition table of the disk.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Time limit of a stop, which waits for requests in flight.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// How long a device may take to appear and to get its permissions.
const OPEN_PATIENCE: Duration = Duration::from_secs(2);

/// Why a command failed.
#[derive(Debug)]
pub(super) struct UblkCommandError {
    command: UblkControlCommand,
    error: io::Error,
}

impl UblkCommandError {
    /// The kernel's error; `None` if it did not answer in time.
    pub(super) fn errno(&self) -> Option<Errno> {
        self.error.raw_os_error().map(Errno::from_raw_os_error)
    }
}

impl fmt::Display for UblkCommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.command.text();
        if self.error.kind() == io::ErrorKind::TimedOut && self.errno().is_none() {
            return write!(
                f,
                "{text}: the kernel does not answer within {} s",
                limit_of(self.command).as_secs()
            );
        }
        write!(f, "{text}: {}", self.error)
    }
}

impl From<UblkCommandError> for io::Error {
    fn from(error: UblkCommandError) -> io::Error {
        io::Error::new(error.error.kind(), error.to_string())
    }
}

/// A connection to the driver.
pub(super) struct UblkDriver {
    control: UblkControl,
    features: UblkFeatures,
}

impl UblkDriver {
    /// Connects to the driver.
    ///
    /// # Errors
    /// The driver is missing, too old or not permitted; the text says what to do.
    pub(super) fn open() -> io::Result<UblkDriver> {
        let control = UblkControl::open().map_err(explain_open_error)?;
        let mut driver = UblkDriver { control, features: UblkFeatures::empty() };
        let answer =
            driver.execute(UblkControlCommand::GetFeatures, UblkControlHeader::default(), vec![0; 8]);
        let answer = answer.map_err(|error| match error.errno() {
            None => io::Error::from(error),
            Some(_) => {
                io::Error::other("the ublk driver of this kernel is too old: Linux 6.5 or later is needed")
            }
        })?;
        let bits = answer.try_into().map_or(0, u64::from_ne_bytes);
        driver.features = UblkFeatures::from_bits_retain(bits);
        Ok(driver)
    }

    /// Features of the driver.
    pub(super) fn features(&self) -> UblkFeatures {
        self.features
    }

    /// Creates a device, of `info.number` or, if that is `u32::MAX`, of any number. Returns the
    /// info as the driver changed it.
    ///
    /// # Errors
    /// EEXIST if the number is in use, and others of the kernel.
    pub(super) fn add(&self, info: &UblkDeviceInfo) -> Result<UblkDeviceInfo, UblkCommandError> {
        let header = UblkControlHeader { device: info.number, ..UblkControlHeader::default() };
        let answer = self.execute(UblkControlCommand::AddDevice, header, info.encode().to_vec())?;
        Ok(decode_info(&answer))
    }

    /// Reads the info of device `number`.
    ///
    /// # Errors
    /// ENODEV if there is none, EPERM if it belongs to somebody else.
    pub(super) fn info(&self, number: u32) -> Result<UblkDeviceInfo, UblkCommandError> {
        let (path_len, mut buffer) = path_buffer(number);
        buffer.resize(buffer.len() + DEVICE_INFO_SIZE, 0);
        let header = UblkControlHeader { device: number, data: 0, path_len };
        let mut answer = self.execute(UblkControlCommand::GetDeviceInfo, header, buffer)?;
        Ok(decode_info(&answer.split_off(path_len.into())))
    }

    /// Opens the device, and retries for 2 s: udev may still be changing its owner.
    ///
    /// # Errors
    /// The text has the path.
    pub(super) fn open_device(&self, number: u32) -> io::Result<UblkDevice> {
        UblkDevice::open(&self.control, number, OPEN_PATIENCE)
            .map_err(|error| io::Error::new(error.kind(), format!("/dev/ublkc{number}: {error}")))
    }

    /// Sets the parameters of a device that is not started.
    pub(super) fn set_params(
        &self,
        info: &UblkDeviceInfo,
        params: &UblkParams,
    ) -> Result<(), UblkCommandError> {
        self.of_device(UblkControlCommand::SetParams, info, 0, &params.encode()).map(drop)
    }

    /// Reads the parameters of a device; `None` if they were never set.
    pub(super) fn params(&self, info: &UblkDeviceInfo) -> Result<Option<UblkParams>, UblkCommandError> {
        let mut bytes = [0; PARAMS_SIZE];
        // The length of the structure that the caller knows.
        bytes[..4].copy_from_slice(&(PARAMS_SIZE as u32).to_ne_bytes());
        let answer = self.of_device(UblkControlCommand::GetParams, info, 0, &bytes)?;
        Ok(answer.try_into().ok().and_then(|bytes: [u8; PARAMS_SIZE]| UblkParams::decode(&bytes)))
    }

    /// Creates the block device, served by this process; all tags must have been fetched.
    pub(super) fn start(&self, info: &UblkDeviceInfo) -> Result<(), UblkCommandError> {
        self.of_device(UblkControlCommand::StartDevice, info, own_pid(), &[]).map(drop)
    }

    /// Prepares the take-over of a device.
    ///
    /// # Errors
    /// EBUSY while the last server ends.
    pub(super) fn start_recovery(&self, info: &UblkDeviceInfo) -> Result<(), UblkCommandError> {
        self.of_device(UblkControlCommand::StartRecovery, info, 0, &[]).map(drop)
    }

    /// Completes the take-over; all tags must have been fetched.
    pub(super) fn end_recovery(&self, info: &UblkDeviceInfo) -> Result<(), UblkCommandError> {
        self.of_device(UblkControlCommand::EndRecovery, info, own_pid(), &[]).map(drop)
    }

    /// Removes the block device. Its requests fail from now on.
    ///
    /// # Errors
    /// EBUSY if the block device is open and the kernel can tell.
    pub(super) fn stop(&self, info: &UblkDeviceInfo) -> Result<(), UblkCommandError> {
        if self.features.contains(UblkFeatures::SAFE_STOP_DEV) {
            return self.of_device(UblkControlCommand::TryStopDevice, info, 0, &[]).map(drop);
        }
        self.stop_always(info)
    }

    /// The same, also if the block device is open.
    pub(super) fn stop_always(&self, info: &UblkDeviceInfo) -> Result<(), UblkCommandError> {
        self.of_device(UblkControlCommand::StopDevice, info, 0, &[]).map(drop)
    }

    /// Removes the device and waits until its number is free. All its files must be closed or about
    /// to be.
    pub(super) fn delete(&self, info: &UblkDeviceInfo) -> Result<(), UblkCommandError> {
        self.of_device(UblkControlCommand::DeleteDevice, info, 0, &[]).map(drop)
    }

    /// Changes the size, in sectors.
    pub(super) fn update_size(&self, info: &UblkDeviceInfo, sectors: u64) -> Result<(), UblkCommandError> {
        self.of_device(UblkControlCommand::UpdateSize, info, sectors, &[]).map(drop)
    }

    /// Executes a command of a device. Those of users without privileges need the path.
    fn of_device(
        &self,
        command: UblkControlCommand,
        info: &UblkDeviceInfo,
        data: u64,
        payload: &[u8],
    ) -> Result<Vec<u8>, UblkCommandError> {
        let (path_len, mut buffer) = match info.flags.contains(UblkFeatures::UNPRIVILEGED_DEV) {
            true => path_buffer(info.number),
            false => (0, Vec::new()),
        };
        buffer.extend_from_slice(payload);
        let mut answer =
            self.execute(command, UblkControlHeader { device: info.number, data, path_len }, buffer)?;
        Ok(answer.split_off(path_len.into()))
    }

    fn execute(
        &self,
        command: UblkControlCommand,
        header: UblkControlHeader,
        buffer: Vec<u8>,
    ) -> Result<Vec<u8>, UblkCommandError> {
        let done = self.control.execute(command.code(), &header.encode(), buffer, limit_of(command));
        done.map_err(|error| UblkCommandError { command, error })
    }
}

/// Time limit of a command.
fn limit_of(command: UblkControlCommand) -> Duration {
    use UblkControlCommand as C;
    match command {
        C::StartDevice | C::EndRecovery => START_LIMIT,
        C::StopDevice | C::TryStopDevice | C::DeleteDevice => STOP_LIMIT,
        _ => LIMIT,
    }
}

fn own_pid() -> u64 {
    u64::from(std::process::id())
}

/// The path of a device with its NUL, and its length.
fn path_buffer(number: u32) -> (u16, Vec<u8>) {
    let path = format!("/dev/ublkc{number}\0").into_bytes();
    (path.len() as u16, path)
}

/// Decodes an answer, which is as long as the buffer was.
fn decode_info(answer: &[u8]) -> UblkDeviceInfo {
    let mut bytes = [0; DEVICE_INFO_SIZE];
    let len = answer.len().min(DEVICE_INFO_SIZE);
    bytes[..len].copy_from_slice(&answer[..len]);
    UblkDeviceInfo::decode(&bytes)
}

fn explain_open_error(error: io::Error) -> io::Error {
    let text = match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOENT | Errno::NXIO | Errno::NODEV) => {
            "there is no /dev/ublk-control: load the driver with `modprobe ublk_drv` (Linux 6.5 or later, \
             CONFIG_BLK_DEV_UBLK)"
        }
        Some(Errno::ACCESS | Errno::PERM) => {
            "no permission for /dev/ublk-control: run as root, or install udm's udev rule (docs/ublk.md)"
        }
        _ => return error,
    };
    io::Error::new(error.kind(), text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_said() {
        let said = |errno: Errno| explain_open_error(errno.into()).to_string();
        assert!(said(Errno::NOENT).contains("modprobe ublk_drv"));
        assert!(said(Errno::ACCESS).contains("udev rule"));
        assert_eq!(said(Errno::MFILE), io::Error::from(Errno::MFILE).to_string());
        let failed = |error| UblkCommandError { command: UblkControlCommand::StartDevice, error }.to_string();
        let late = failed(io::ErrorKind::TimedOut.into());
        assert_eq!(late, "start device: the kernel does not answer within 30 s");
        assert!(failed(Errno::INVAL.into()).starts_with("start device: Invalid argument"));
    }
}
