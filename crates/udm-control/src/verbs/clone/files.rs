//! The destination and the metadata of a new clone: files that are made, and checks of what exists.

use super::clone_error;
use crate::TableLoadControlIo;
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry, TableResolver};
use crate::state_folder::file_stamp::IdentifiedStoreFile;
use crate::verbs::CancelToken;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use udm_core::errno::{EEXIST, EINTR, EINVAL, EIO};
use udm_core::{SECTOR_SIZE, Sector, Sectors, control_io};
use udm_dm::{DeviceNameResolver, ResolvedDevice};
use udm_wire::clone_metadata::{BLOCK_LEN, CloneHeader, read_header_copies};
use udm_wire::uri::{DeviceUri, ImageFormat};

/// File mode of what is made: it holds data of the source.
const MODE: u32 = 0o600;

/// How much of a destination that is no regular file must be zeroes: enough for the begin of any
/// file system or partition table.
const ZEROES_MIN: Sectors = Sectors((1 << 20) / SECTOR_SIZE);

/// Size of a piece of a file that is read for the check for zeroes.
const PIECE: usize = 1 << 20;

/// The files of a new clone. Unless they are kept, dropping this takes back what was made.
pub(in crate::verbs) struct NewCloneFiles<'a> {
    pub registry: &'a DeviceRegistry,
    /// Name of the clone, for errors.
    pub name: &'a str,
    pub folder: &'a BaseDir,
    pub cancel_token: &'a CancelToken,
    pub made: Vec<MadeFile>,
}

/// A file that this verb made or made longer.
pub(in crate::verbs) enum MadeFile {
    Created(IdentifiedStoreFile),
    /// The file was empty before.
    Extended(File),
}

impl Drop for NewCloneFiles<'_> {
    fn drop(&mut self) {
        for made in &self.made {
            // The clone was not created, so nobody has written data that counts.
            let _ = match made {
                MadeFile::Created(file) => file.remove(),
                MadeFile::Extended(file) => file.set_len(0),
            };
        }
    }
}

/// A device of a new clone, as it is before the verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Existing {
    /// There is no file at the path.
    Nothing,
    /// An empty regular file.
    EmptyFile,
    /// A regular file with a length.
    File,
    /// Anything else that a table can name.
    Device,
}

fn look(uri: &DeviceUri) -> io::Result<Existing> {
    let DeviceUri::File(file) = uri else { return Ok(Existing::Device) };
    if file.format != ImageFormat::Raw {
        return Ok(Existing::Device);
    }
    match fs::metadata(&file.path) {
        Ok(found) if !found.is_file() => Ok(Existing::Device),
        Ok(found) if found.len() == 0 => Ok(Existing::EmptyFile),
        Ok(_) => Ok(Existing::File),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Existing::Nothing),
        Err(error) => Err(error),
    }
}

impl NewCloneFiles<'_> {
    /// Ends the guard: the files stay.
    pub(in crate::verbs) fn keep(mut self) {
        self.made.clear();
    }

    /// Opens the device of `uri`. May block.
    pub(in crate::verbs) fn open(&self, uri: &DeviceUri) -> Result<ResolvedDevice, VerbError> {
        let opened = TableResolver::new(self.registry, self.folder).get(&uri.to_string());
        opened.map_err(|error| clone_error(self.name, error.errno, error.reason))
    }

    /// The header of existing metadata; `None` if a clone can begin there.
    ///
    /// # Errors
    /// The device cannot be read, or holds something else.
    pub(in crate::verbs) fn read_header(
        &self,
        metadata: &DeviceUri,
    ) -> Result<Option<CloneHeader>, VerbError> {
        match self.look(metadata)? {
            Existing::Nothing | Existing::EmptyFile => return Ok(None),
            Existing::File | Existing::Device => {}
        }
        let device = self.open(metadata)?.device;
        let sectors = Sectors::from_bytes(2 * BLOCK_LEN as u64);
        if device.limits().size < sectors {
            // The load of the table says how much is needed.
            return Ok(None);
        }
        let blocks = control_io::read_sectors(&self.io(), &device, Sector(0), sectors);
        let blocks = blocks.map_err(|error| clone_error(self.name, error.errno, error.text))?;
        let (first, second) = blocks.split_at(BLOCK_LEN);
        let header = read_header_copies([first, second]);
        header.map_err(|error| clone_error(self.name, EINVAL, format!("{metadata}: {error}")))
    }

    /// Checks that the destination of existing metadata is there.
    ///
    /// # Errors
    /// EINVAL if it is not: a new file would lack what the metadata says is in it.
    pub(in crate::verbs) fn check_continues(
        &self,
        metadata: &DeviceUri,
        destination: &DeviceUri,
    ) -> Result<(), VerbError> {
        match self.look(destination)? {
            Existing::File | Existing::Device => Ok(()),
            Existing::Nothing | Existing::EmptyFile => {
                let why = format!(
                    "{metadata} belongs to a clone whose destination {destination} is gone or empty: to begin anew, remove {metadata} or name another"
                );
                Err(clone_error(self.name, EINVAL, why))
            }
        }
    }

    /// Makes `uri` a device of `sectors` zeroes, if it is a file that does not exist or is empty.
    /// Returns false if it exists; nothing is changed then.
    ///
    /// # Errors
    /// The system's.
    pub(in crate::verbs) fn make(&mut self, uri: &DeviceUri, sectors: Sectors) -> Result<bool, VerbError> {
        let (DeviceUri::File(file), existing) = (uri, self.look(uri)?) else { return Ok(false) };
        let mut options = OpenOptions::new();
        options.write(true).mode(MODE);
        let opened = match existing {
            Existing::Nothing => options.create_new(true).open(&file.path),
            Existing::EmptyFile => options.open(&file.path),
            Existing::File | Existing::Device => return Ok(false),
        };
        let failed = |error| self.file_error(&file.path, &error);
        let opened = opened.map_err(failed)?;
        let made = match existing {
            Existing::Nothing => {
                let identified = IdentifiedStoreFile::new(&file.path, &opened).map_err(|error| {
                    // Without an identity nothing else would remove the new file.
                    let _ = fs::remove_file(&file.path);
                    failed(error)
                })?;
                MadeFile::Created(identified)
            }
            _ => MadeFile::Extended(opened.try_clone().map_err(failed)?),
        };
        self.made.push(made);
        let sized = opened.set_len(sectors.bytes()).and_then(|()| opened.sync_all());
        // A flush of the clone makes the data durable, but not the name of a new file.
        let named = sized.and_then(|()| sync_folder(file.path.parent().unwrap_or(Path::new("/"))));
        named.map_err(|error| self.file_error(&file.path, &error))?;
        Ok(true)
    }

    /// Checks that an existing destination has zeroes: a regular file only zeroes, another device
    /// in its first MiB. May block, and reads all data of a file of zeroes that is not sparse.
    ///
    /// # Errors
    /// EEXIST if it has data; the error of a device that cannot be read.
    pub(in crate::verbs) fn check_zeroes(&self, destination: &DeviceUri) -> Result<(), VerbError> {
        let found = match (destination, self.look(destination)?) {
            (DeviceUri::File(file), Existing::File) => {
                let opened = File::open(&file.path);
                let found = opened.and_then(|opened| first_data(&opened, self.cancel_token));
                found.map_err(|error| self.file_error(&file.path, &error))?
            }
            _ => {
                let device = self.open(destination)?.device;
                let sectors = Sectors(ZEROES_MIN.0.min(device.limits().size.0));
                let begin = control_io::read_sectors(&self.io(), &device, Sector(0), sectors);
                let begin = begin.map_err(|error| clone_error(self.name, error.errno, error.text))?;
                begin.iter().position(|byte| *byte != 0).map(|at| at as u64)
            }
        };
        let Some(at) = found else { return Ok(()) };
        let why = format!(
            "{destination} has data at byte {at}, and is not overwritten: name a file that does not exist, or the metadata of the clone that it belongs to"
        );
        Err(clone_error(self.name, EEXIST, why))
    }

    fn look(&self, uri: &DeviceUri) -> Result<Existing, VerbError> {
        look(uri).map_err(|error| clone_error(self.name, errno_of(&error), format!("{uri}: {error}")))
    }

    fn io(&self) -> TableLoadControlIo<'_> {
        TableLoadControlIo::new(self.registry.cores()).until(self.cancel_token)
    }

    fn file_error(&self, path: &Path, error: &io::Error) -> VerbError {
        let errno = errno_of(error);
        let advice = self.registry.advice_on_refused_file(errno).map(|advice| format!("; {advice}"));
        let why = format!("{}: {error}{}", path.display(), advice.unwrap_or_default());
        clone_error(self.name, errno, why)
    }
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

fn errno_of(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(match error.kind() {
        ErrorKind::Interrupted => EINTR,
        _ => EIO,
    })
}

/// The first byte of a file that is not zero. Holes are not read.
fn first_data(file: &File, cancel_token: &CancelToken) -> io::Result<Option<u64>> {
    let mut buffer = vec![0; PIECE];
    let mut at = 0;
    loop {
        at = match seek(file, SeekFrom::Data(at)) {
            Ok(at) => at,
            Err(Errno::NXIO) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let end = seek(file, SeekFrom::Hole(at))?;
        while at < end {
            if let Some(reason) = cancel_token.reason() {
                return Err(io::Error::new(ErrorKind::Interrupted, reason.reason.clone()));
            }
            let most = PIECE.min(usize::try_from(end - at).unwrap_or(PIECE));
            let read = file.read_at(&mut buffer[..most], at)?;
            if let Some(used) = buffer[..read].iter().position(|byte| *byte != 0) {
                return Ok(Some(at + used as u64));
            }
            if read == 0 {
                return Ok(None);
            }
            at += read as u64;
        }
    }
}
