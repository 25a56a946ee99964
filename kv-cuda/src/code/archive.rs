//! Archives of compiled kernels: one file for one architecture, embedded in this crate.
//!
//! An archive stores, for every unit, the key of its inputs, so that code compiled from other
//! sources is never run. Damaged bytes are refused.
//!
//! Little-endian: magic, version of the compiler (u32), number of entries (u32). Each entry: its
//! name, key (16 bytes), number of kernels (u32) and their names, length (u32) and XXH3-64 (u64) of
//! its image, and length of the image as a Zstandard frame (u32). Names are a length (u32) and
//! UTF-8. The frames follow, one after another.
use std::fmt;
use std::io::Read as _;

use ruzstd::decoding::StreamingDecoder;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use xxhash_rust::xxh3::xxh3_64;

use super::Key;

/// One compiled unit.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry<'a> {
    /// File name of the unit.
    pub unit: String,
    /// Key of its inputs.
    pub key: Key,
    /// Names of its kernels.
    pub kernels: Vec<String>,
    bytes: u32,
    hash: u64,
    frame: &'a [u8],
}

/// Compiled units of one architecture.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Archive<'a> {
    /// The compiler's version: 13000 for 13.0.
    pub version: u32,
    /// Units, in order of names.
    pub entries: Vec<Entry<'a>>,
}

/// Bytes that are not an archive, or not the one that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Damaged;

impl fmt::Display for Damaged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the archive of compiled kernels is damaged")
    }
}

impl std::error::Error for Damaged {}

impl<'a> Archive<'a> {
    /// Parses the names and keys of an archive; images are unpacked one by one.
    ///
    /// # Errors
    /// [`Damaged`] for anything else.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Damaged> {
        let mut reader = Reader { rest: bytes };
        if reader.take(MAGIC.len())? != MAGIC {
            return Err(Damaged);
        }
        let version = reader.number()?;
        let count = reader.number()?;
        let mut heads = Vec::new();
        for _ in 0..count {
            let unit = reader.name()?;
            let key = Key(reader.array()?);
            let kernels = (0..reader.number()?).map(|_| reader.name()).collect::<Result<_, _>>()?;
            let (bytes, hash) = (reader.number()?, u64::from_le_bytes(reader.array()?));
            heads.push((Entry { unit, key, kernels, bytes, hash, frame: &[] }, reader.number()?));
        }
        let mut entries = Vec::new();
        for (entry, length) in heads {
            let frame = reader.take(usize::try_from(length).map_err(|_| Damaged)?)?;
            entries.push(Entry { frame, ..entry });
        }
        if !reader.rest.is_empty() {
            return Err(Damaged);
        }
        Ok(Self { version, entries })
    }

    /// Finds the unit of this file name.
    pub fn entry(&self, unit: &str) -> Option<&Entry<'a>> {
        self.entries.iter().find(|entry| entry.unit == unit)
    }
}

impl Entry<'_> {
    /// Returns the length of the image.
    pub fn image_bytes(&self) -> u32 {
        self.bytes
    }

    /// Returns its length in the archive.
    pub fn packed_bytes(&self) -> usize {
        self.frame.len()
    }

    /// Unpacks the image that a driver loads.
    ///
    /// # Errors
    /// [`Damaged`] if length or hash differ.
    pub fn image(&self) -> Result<Vec<u8>, Damaged> {
        let mut image = Vec::new();
        let decoder = StreamingDecoder::new(self.frame).map_err(|_| Damaged)?;
        // One byte more than expected, so that an overlong frame is refused before it is unpacked.
        let most = u64::from(self.bytes) + 1;
        decoder.take(most).read_to_end(&mut image).map_err(|_| Damaged)?;
        let same = u32::try_from(image.len()) == Ok(self.bytes) && xxh3_64(&image) == self.hash;
        if same { Ok(image) } else { Err(Damaged) }
    }
}

/// Packs compiled units: name, key, kernels, image. `compress` makes a Zstandard frame.
///
/// # Errors
/// [`Damaged`] if the packed archive does not unpack to equal content, or has 4 GiB or more.
pub fn pack(
    version: u32,
    units: &[(String, Key, Vec<String>, Vec<u8>)],
    compress: impl Fn(&[u8]) -> Vec<u8>,
) -> Result<Vec<u8>, Damaged> {
    let mut head = MAGIC.to_vec();
    let mut frames = Vec::new();
    number(&mut head, u32::to_le_bytes(version));
    number(&mut head, length(units.len())?);
    for (unit, key, kernels, image) in units {
        name(&mut head, unit)?;
        head.extend(key.0);
        number(&mut head, length(kernels.len())?);
        for kernel in kernels {
            name(&mut head, kernel)?;
        }
        number(&mut head, length(image.len())?);
        head.extend(xxh3_64(image).to_le_bytes());
        let frame = compress(image);
        number(&mut head, length(frame.len())?);
        frames.extend(frame);
    }
    head.extend(frames);
    let archive = Archive::parse(&head)?;
    for (entry, (.., image)) in archive.entries.iter().zip(units) {
        if entry.image()? != *image {
            return Err(Damaged);
        }
    }
    Ok(head)
}

/// Compresses in this process, to about three times the size of the `zstd` program's best.
pub fn compress(image: &[u8]) -> Vec<u8> {
    compress_to_vec(image, CompressionLevel::Fastest)
}

fn length(length: usize) -> Result<[u8; 4], Damaged> {
    u32::try_from(length).map(u32::to_le_bytes).map_err(|_| Damaged)
}

fn number(to: &mut Vec<u8>, bytes: [u8; 4]) {
    to.extend(bytes);
}

fn name(to: &mut Vec<u8>, name: &str) -> Result<(), Damaged> {
    to.extend(length(name.len())?);
    to.extend(name.bytes());
    Ok(())
}

/// The bytes that are not parsed yet.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], Damaged> {
        let (taken, rest) = self.rest.split_at_checked(bytes).ok_or(Damaged)?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Damaged> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(Damaged)?;
        self.rest = rest;
        Ok(*taken)
    }

    fn number(&mut self) -> Result<u32, Damaged> {
        self.array().map(u32::from_le_bytes)
    }

    fn name(&mut self) -> Result<String, Damaged> {
        let bytes = usize::try_from(self.number()?).map_err(|_| Damaged)?;
        String::from_utf8(self.take(bytes)?.to_vec()).map_err(|_| Damaged)
    }
}

const MAGIC: &[u8] = b"kv-cuda archive 1\n";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code;

    type Packed = (String, Key, Vec<String>, Vec<u8>);

    fn units() -> Vec<Packed> {
        // Partly repetitive, like machine code.
        let mut state = 1_u32;
        let mut image = vec![0; 5000];
        image.extend((0..70_000).map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state.to_le_bytes()[3]
        }));
        image.extend_from_within(..60_000);
        let kernels = vec!["attend_8".to_owned(), "attend_16".to_owned()];
        vec![
            ("attend.cu".to_owned(), Key([7; 16]), kernels, image),
            ("empty.cu".to_owned(), Key([9; 16]), vec![], vec![]),
        ]
    }

    #[test]
    fn packed_units_unpack() {
        let units = units();
        let bytes = pack(13000, &units, compress).unwrap();
        let archive = Archive::parse(&bytes).unwrap();
        assert_eq!((archive.version, archive.entries.len()), (13000, 2));
        for (unit, key, kernels, image) in &units {
            let entry = archive.entry(unit).unwrap();
            assert_eq!((entry.key, &entry.kernels), (*key, kernels));
            assert_eq!(entry.image().unwrap(), *image);
            assert_eq!(usize::try_from(entry.image_bytes()).unwrap(), image.len());
        }
        assert!(archive.entry("other.cu").is_none());
        assert!(bytes.len() < units[0].3.len() * 2 / 3, "{} bytes", bytes.len());
    }

    #[test]
    fn a_lossy_compressor_is_detected() {
        let loses = |image: &[u8]| compress(image.split_last().map_or(&[], |(_, rest)| rest));
        assert_eq!(pack(13000, &units(), loses), Err(Damaged));
        assert_eq!(pack(13000, &units(), <[u8]>::to_vec), Err(Damaged));
    }

    #[test]
    fn damage_is_detected() {
        let bytes = pack(13000, &units(), compress).unwrap();
        for length in (0..bytes.len()).step_by(97).chain([bytes.len() - 1]) {
            assert_eq!(Archive::parse(&bytes[..length]), Err(Damaged), "cut at {length}");
        }
        let original = Archive::parse(&bytes).unwrap();
        let mut harmless = 0;
        for at in (0..200).chain((200..bytes.len()).step_by(501)) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x41;
            let Ok(archive) = Archive::parse(&damaged) else { continue };
            // The hash does not cover names, keys and version; a wrong one is not found.
            let image = |archive: &Archive<'_>| archive.entry("attend.cu").map(Entry::image);
            if let Some(Ok(same)) = image(&archive) {
                assert_eq!(Ok(same), image(&original).unwrap());
                harmless += 1;
            }
        }
        assert!(harmless < 150, "{harmless} changes went unnoticed");
    }

    #[test]
    fn embedded_archives_are_intact() {
        for arch in code::Arch::SHIPPED {
            for entry in code::embedded(arch).map_or(Vec::new(), |found| found.unwrap().entries) {
                assert!(!entry.image().unwrap().is_empty(), "{arch} {}", entry.unit);
                assert!(!entry.kernels.is_empty(), "{arch} {}", entry.unit);
            }
        }
    }
}
