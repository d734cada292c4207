//! Opens an image and the files that it names, and builds the map of its disk.

use super::clusters::{ClusterFile, ClusterReader};
use super::image_bytes::ImageBytes;
use super::{CHAIN_MAX, ImageFile, MAX_SECTORS, Qcow2Device};
use crate::DiskIdentity;
use crate::file::{OpenDisks, lock_file_against_writers};
use rustix::fs::OFlags;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use udm_core::errno::{EBUSY, EINVAL, EIO, ELOOP};
use udm_core::{Device, DeviceControlError, DeviceId, Limits, SECTOR_SIZE, Sectors, SharedDiskState};
use udm_wire::qcow2::{DiskExtentMap, ExtentSource, Qcow2Error, Qcow2Header, read_image_extents};
use udm_wire::uri::{FileUri, ImageFormat};

/// Pauses until a file that another program has just closed is free.
const LOCK_TRIES: u32 = 25;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Opens the disk in the image `uri`, which has the format qcow2.
///
/// # Errors
/// * Those of a file.
/// * EINVAL for an image that is damaged, not supported, or names other files without
///   `backing=allow`.
/// * EBUSY if another program writes a file of the image.
/// * ELOOP if the files refer to each other in a circle, or are too many.
pub(crate) fn open_image(
    disks: &OpenDisks,
    uri: &FileUri,
) -> Result<(DiskIdentity, Qcow2Device), DeviceControlError> {
    let mut chain = ImageChain { disks, uri, files: Vec::new(), identities: Vec::new() };
    let map = chain.open_qcow2(&uri.path)?;
    let ImageChain { files, identities, .. } = chain;
    Ok((identities[0], make_device(&uri.path, map, files)?))
}

/// Makes the disk in the qcow2 image that is the object called `name`. `object` reads the object as
/// a device. The image may not need other files.
///
/// # Errors
/// As for a file.
pub fn open_image_in_object(
    name: &str,
    object: Arc<dyn Device>,
    bytes: Arc<dyn ImageBytes>,
) -> Result<Arc<dyn Device>, DeviceControlError> {
    let path = Path::new(name);
    let image = MetadataFile { path, bytes: Arc::clone(&bytes) };
    let header = image.header()?;
    if header.external_data || header.backing.is_some() {
        let text = "an image that needs other files, which only an image in a file may";
        return Err(make_image_refusal(path, EINVAL, text));
    }
    let extents = image.read_with(|len, read| read_image_extents(&header, len, len, read))?;
    let map = DiskExtentMap::over(&extents, Sectors(header.size / SECTOR_SIZE), 0, None)
        .map_err(|why| make_image_refusal(path, EINVAL, &why.to_string()))?;
    let image = ImageFile { device: object, bytes, cluster_bits: header.cluster_bits };
    let device = make_device(path, map, vec![OpenedFile { path: path.to_owned(), image }])?;
    Ok(Arc::new(device))
}

/// Makes the device of an image with this map and these files.
fn make_device(
    path: &Path,
    map: DiskExtentMap,
    files: Vec<OpenedFile>,
) -> Result<Qcow2Device, DeviceControlError> {
    if map.size() == Sectors::ZERO {
        return Err(make_image_refusal(path, EINVAL, "a disk of no size"));
    }
    let limits = combine_limits(path, map.size(), &files)?;
    let clusters = match map.has_compressed() {
        true => {
            let files = files.iter().map(|file| ClusterFile {
                bytes: Arc::clone(&file.image.bytes),
                name: file.path.display().to_string(),
                cluster_bits: file.image.cluster_bits,
            });
            Some(
                ClusterReader::start(files.collect())
                    .map_err(|e| make_image_refusal(path, EIO, &e.to_string()))?,
            )
        }
        false => None,
    };
    Ok(Qcow2Device {
        id: DeviceId::new(),
        map: Arc::new(map),
        files: files.into_iter().map(|file| file.image).collect(),
        clusters,
        limits,
        shared_disk_state: SharedDiskState::default(),
    })
}

/// The paths of the other files that an image names, for a sandbox: backing files and files with
/// data, as far as they can be found. Empty without `backing=allow`.
#[must_use]
pub fn files_of_image(uri: &FileUri) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut next = match uri.format {
        ImageFormat::Qcow2 { allow_backing: true } => Some(uri.path.clone()),
        _ => None,
    };
    while let Some(path) = next.take()
        && found.len() < CHAIN_MAX
    {
        let Ok(header) = read_header(&path) else { break };
        found.extend(header.data_file.iter().filter_map(|name| path_of_name(&path, name).ok()));
        let Some(backing) = header.backing else { break };
        let Ok(backing_path) = path_of_name(&path, &backing.name) else { break };
        found.push(backing_path.clone());
        next = (backing.format.as_deref() == Some("qcow2")).then_some(backing_path);
    }
    found
}

fn read_header(path: &Path) -> Result<Qcow2Header, DeviceControlError> {
    // A FIFO is not waited for.
    let file = std::fs::OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path);
    let image = MetadataFile { path, bytes: Arc::new(file.map_err(|e| make_image_io_error(path, &e))?) };
    image.header()
}

/// The files of an image that are open so far.
struct ImageChain<'a> {
    disks: &'a OpenDisks,
    /// The options of all files.
    uri: &'a FileUri,
    files: Vec<OpenedFile>,
    identities: Vec<DiskIdentity>,
}

struct OpenedFile {
    path: PathBuf,
    image: ImageFile,
}

impl ImageChain<'_> {
    /// Opens the file at `path`, and locks it. Returns its index.
    fn open_file(&mut self, path: &Path) -> Result<u8, DeviceControlError> {
        if self.files.len() == CHAIN_MAX {
            return Err(make_image_refusal(
                path,
                ELOOP,
                &format!("more than {CHAIN_MAX} files for one image"),
            ));
        }
        let uri = FileUri {
            path: path.to_owned(),
            readonly: true,
            format: ImageFormat::Qcow2 { allow_backing: false },
            queue: None,
            ..self.uri.clone()
        };
        let (identity, device) = self.disks.open(&uri)?;
        if self.identities.contains(&identity) {
            return Err(make_image_refusal(
                path,
                ELOOP,
                "the files of the image refer to each other in a circle",
            ));
        }
        let file = File::open(path).map_err(|e| make_image_io_error(path, &e))?;
        let stat = rustix::fs::fstat(&file).map_err(|e| make_image_io_error(path, &e.into()))?;
        if DiskIdentity::of(&stat) != Some(identity) {
            return Err(make_image_refusal(path, EBUSY, "leads to another file than a moment ago"));
        }
        if self.uri.exclusive {
            lock_image_file(path, &file)?;
        }
        self.identities.push(identity);
        let image = ImageFile { device: Arc::new(device), bytes: Arc::new(file), cluster_bits: 0 };
        self.files.push(OpenedFile { path: path.to_owned(), image });
        Ok((self.files.len() - 1) as u8)
    }

    fn metadata<'a>(&self, index: u8, path: &'a Path) -> MetadataFile<'a> {
        MetadataFile { path, bytes: Arc::clone(&self.files[usize::from(index)].image.bytes) }
    }

    /// Opens the qcow2 image at `path` and the files that it names. Returns the map of its disk.
    fn open_qcow2(&mut self, path: &Path) -> Result<DiskExtentMap, DeviceControlError> {
        let index = self.open_file(path)?;
        let image = self.metadata(index, path);
        let header = image.header()?;
        self.files[usize::from(index)].image.cluster_bits = header.cluster_bits;
        let data_file = self.open_data_file(path, &header)?;
        let data_len = match data_file {
            Some((index, ref path)) => self.metadata(index, path).len()?,
            None => image.len()?,
        };
        let extents = image.read_with(|len, read| read_image_extents(&header, len, data_len, read))?;
        let has_gaps = extents.iter().any(|extent| extent.source == ExtentSource::Backing);
        let backing = match header.backing {
            Some(backing) => {
                self.check_allowed(path, "backing file", &backing.name)?;
                let backing_path = path_of_name(path, &backing.name)?;
                // The file of an image without gaps need not exist.
                match backing.format.as_deref() {
                    _ if !has_gaps => None,
                    Some("qcow2") => Some(self.open_qcow2(&backing_path)?),
                    Some("raw") => Some(self.open_raw(&backing_path)?),
                    Some(other) => {
                        let text = format!("its backing file is in format {other:?}, not raw or qcow2");
                        return Err(make_image_refusal(path, EINVAL, &text));
                    }
                    None => {
                        let text = "it does not name the format of its backing file: \
                                    \"qemu-img rebase -u -b FILE -F FORMAT IMAGE\" adds the name";
                        return Err(make_image_refusal(path, EINVAL, text));
                    }
                }
            }
            None => None,
        };
        let data = data_file.map_or(index, |(index, _)| index);
        DiskExtentMap::over(&extents, Sectors(header.size / SECTOR_SIZE), data, backing.as_ref())
            .map_err(|why| make_image_refusal(path, EINVAL, &why.to_string()))
    }

    fn open_raw(&mut self, path: &Path) -> Result<DiskExtentMap, DeviceControlError> {
        let index = self.open_file(path)?;
        let len = self.metadata(index, path).len()?;
        if !len.is_multiple_of(SECTOR_SIZE) {
            return Err(make_image_refusal(path, EINVAL, "a backing file that is not made of whole sectors"));
        }
        Ok(DiskExtentMap::raw(Sectors(len / SECTOR_SIZE), index))
    }

    /// Opens the file with the data of the image at `path`, if that is another file.
    fn open_data_file(
        &mut self,
        path: &Path,
        header: &Qcow2Header,
    ) -> Result<Option<(u8, PathBuf)>, DeviceControlError> {
        if !header.external_data {
            return Ok(None);
        }
        let Some(name) = &header.data_file else {
            return Err(make_image_refusal(
                path,
                EINVAL,
                "its data is in another file, which it does not name",
            ));
        };
        self.check_allowed(path, "data file", name)?;
        let data_path = path_of_name(path, name)?;
        Ok(Some((self.open_file(&data_path)?, data_path)))
    }

    fn check_allowed(&self, path: &Path, what: &str, name: &str) -> Result<(), DeviceControlError> {
        if self.uri.format == (ImageFormat::Qcow2 { allow_backing: true }) {
            return Ok(());
        }
        let text = format!(
            "it needs the {what} {name:?}: backing=allow opens it, \
             \"qemu-img convert -O qcow2 IMAGE NEW\" makes an image without it"
        );
        Err(make_image_refusal(path, EINVAL, &text))
    }
}

/// The path of a file that the image at `image` names. A relative one starts at the folder of the
/// image, as in QEMU.
fn path_of_name(image: &Path, name: &str) -> Result<PathBuf, DeviceControlError> {
    let name = name.strip_prefix("file:").unwrap_or(name);
    let protocol = name.split('/').next().is_some_and(|first| first.contains(':'));
    if protocol {
        return Err(make_image_refusal(image, EINVAL, &format!("it names {name:?}, which is not a file")));
    }
    Ok(image.parent().unwrap_or(Path::new("")).join(name))
}

/// Locks a file of an image, unless another program writes it.
fn lock_image_file(path: &Path, file: &File) -> Result<(), DeviceControlError> {
    for _ in 0..LOCK_TRIES {
        if lock_file_against_writers(file.as_fd()).is_ok() {
            return Ok(());
        }
        std::thread::sleep(LOCK_PAUSE);
    }
    let text = "in use: another program writes it, by QEMU's locks (exclusive=off?)";
    Err(make_image_refusal(path, EBUSY, text))
}

/// Combines the limits of the files to those of a disk of `size`.
fn combine_limits(path: &Path, size: Sectors, files: &[OpenedFile]) -> Result<Limits, DeviceControlError> {
    let mut limits = Limits::new(size);
    for OpenedFile { image, .. } in files {
        limits = limits.stack(&image.device.limits());
    }
    let block = u64::from(limits.logical_block);
    let small = |file: &OpenedFile| file.image.cluster_bits > 0 && (1 << file.image.cluster_bits) < block;
    if files.iter().any(small) || !size.bytes().is_multiple_of(block) {
        let text = format!("its clusters do not fit to blocks of {block} bytes (direct=off?)");
        return Err(make_image_refusal(path, EINVAL, &text));
    }
    Ok(Limits {
        max_sectors: limits.max_sectors.min(MAX_SECTORS),
        max_discard: Sectors::ZERO,
        max_write_zeroes: Sectors::ZERO,
        write_cache: false,
        read_only: true,
        ..limits
    })
}

/// A file with tables.
struct MetadataFile<'a> {
    path: &'a Path,
    bytes: Arc<dyn ImageBytes>,
}

impl MetadataFile<'_> {
    /// Length in bytes.
    fn len(&self) -> Result<u64, DeviceControlError> {
        self.bytes.len().map_err(|e| make_image_io_error(self.path, &e))
    }

    fn header(&self) -> Result<Qcow2Header, DeviceControlError> {
        self.read_with(Qcow2Header::read)
    }

    /// Calls `parse` with the length of the file and a function that reads it.
    fn read_with<T>(
        &self,
        parse: impl FnOnce(u64, &mut udm_wire::qcow2::ReadImageBytes<'_>) -> Result<T, Qcow2Error>,
    ) -> Result<T, DeviceControlError> {
        let len = self.len()?;
        let mut read = |offset: u64, buf: &mut [u8]| {
            self.bytes.read_exact_at(buf, offset).map_err(|e| Qcow2Error::unreadable(offset, &e.to_string()))
        };
        parse(len, &mut read).map_err(|why| make_image_refusal(self.path, EINVAL, &why.to_string()))
    }
}

fn make_image_refusal(path: &Path, errno: i32, text: &str) -> DeviceControlError {
    DeviceControlError::new(errno, format!("{}: {text}", path.display()))
}

fn make_image_io_error(path: &Path, error: &std::io::Error) -> DeviceControlError {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    DeviceControlError::new(error.raw_os_error().unwrap_or(EIO), format!("{}: {text}", path.display()))
}
