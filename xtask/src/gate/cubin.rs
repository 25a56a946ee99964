//! Reads what a compiled unit says about its kernels: registers and static shared memory.
//!
//! A unit is an ELF file of 64 bits. `.nv.info` has the registers by symbol, and the size of
//! `.nv.shared.KERNEL` is the kernel's static shared memory, that of the system included.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};

/// Resources of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Resources {
    pub(super) registers: u32,
    pub(super) shared_bytes: u32,
}

/// Returns the resources by kernel.
///
/// # Errors
/// If the bytes are not such a file, or cut off.
pub(super) fn resources(image: &[u8]) -> Result<BTreeMap<String, Resources>> {
    let file = Elf::parse(image).context("not a compiled unit")?;
    let mut found: BTreeMap<String, Resources> = BTreeMap::new();
    let info = file.section(".nv.info").context("no .nv.info")?;
    for (symbol, registers) in registers(info)? {
        let name = file.symbol(symbol)?;
        // Functions that are not inlined are listed too.
        if file.section(&format!(".text.{name}")).is_ok() {
            found.entry(name).or_default().registers = registers;
        }
    }
    for (name, resources) in &mut found {
        let shared = file.sections.iter().find(|one| one.name == format!(".nv.shared.{name}"));
        resources.shared_bytes = shared.map_or(Ok(0), |one| u32::try_from(one.bytes))?;
    }
    Ok(found)
}

/// Returns symbol and registers of each entry of `.nv.info` that has them.
fn registers(info: &[u8]) -> Result<Vec<(u32, u32)>> {
    /// A value of 16 bits that is the length of the data which follow.
    const SIZED: u8 = 4;
    const REGISTERS: u8 = 0x2f;
    let mut found = Vec::new();
    let mut rest = info;
    while let [format, attribute, low, high, after @ ..] = rest {
        let length = if *format == SIZED { u16::from_le_bytes([*low, *high]) } else { 0 };
        let (data, after) = after.split_at_checked(length.into()).context(".nv.info is cut off")?;
        if *attribute == REGISTERS {
            found.push((u32_at(data, 0)?, u32_at(data, 4)?));
        }
        rest = after;
    }
    if !rest.is_empty() {
        bail!(".nv.info is cut off");
    }
    Ok(found)
}

struct Elf<'a> {
    image: &'a [u8],
    sections: Vec<Section>,
}

struct Section {
    name: String,
    offset: u64,
    bytes: u64,
    is_stored: bool,
}

impl<'a> Elf<'a> {
    fn parse(image: &'a [u8]) -> Result<Self> {
        /// Magic, 64 bits, little-endian.
        const HEAD: &[u8] = b"\x7fELF\x02\x01";
        /// A section without bytes in the file.
        const NOBITS: u32 = 8;
        if !image.starts_with(HEAD) {
            bail!("no ELF file of 64 bits");
        }
        let table = u64_at(image, 40)?;
        let (head_bytes, count, strings) =
            (u16_at(image, 58)?, u16_at(image, 60)?, u16_at(image, 62)?);
        let mut heads = Vec::new();
        for index in 0..count {
            let place = u64::from(index).checked_mul(head_bytes.into());
            let place = place.and_then(|place| place.checked_add(table)).context("too large")?;
            let head = slice(image, place, head_bytes.into())?;
            let name = u32_at(head, 0)?;
            let is_stored = u32_at(head, 4)? != NOBITS;
            let (offset, bytes) = (u64_at(head, 24)?, u64_at(head, 32)?);
            heads.push((name, Section { name: String::new(), offset, bytes, is_stored }));
        }
        let (_, list) = heads.get(usize::from(strings)).context("no names of sections")?;
        let list = slice(image, list.offset, list.bytes)?;
        let named = heads
            .into_iter()
            .map(|(name, section)| Ok(Section { name: string(list, name)?, ..section }));
        Ok(Self { sections: named.collect::<Result<_>>()?, image })
    }

    fn section(&self, name: &str) -> Result<&'a [u8]> {
        let found = self.sections.iter().find(|section| section.name == name && section.is_stored);
        let found = found.with_context(|| format!("no section {name}"))?;
        slice(self.image, found.offset, found.bytes)
    }

    /// Returns the name of a symbol.
    fn symbol(&self, index: u32) -> Result<String> {
        const BYTES: u64 = 24;
        let place = u64::from(index).checked_mul(BYTES).context("too large")?;
        let symbol = slice(self.section(".symtab")?, place, BYTES)?;
        string(self.section(".strtab")?, u32_at(symbol, 0)?)
    }
}

fn slice(bytes: &[u8], offset: u64, length: u64) -> Result<&[u8]> {
    let begin = usize::try_from(offset)?;
    let end = begin.checked_add(usize::try_from(length)?).context("too large")?;
    bytes.get(begin..end).context("the file is cut off")
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N]> {
    let found = bytes.get(at..).and_then(|rest| rest.first_chunk());
    found.copied().context("the file is cut off")
}

fn u16_at(bytes: &[u8], at: usize) -> Result<u16> {
    array(bytes, at).map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32> {
    array(bytes, at).map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Result<u64> {
    array(bytes, at).map(u64::from_le_bytes)
}

/// Returns the string that begins at an offset of a table and ends with a zero.
fn string(table: &[u8], at: u32) -> Result<String> {
    let rest = table.get(usize::try_from(at)?..).context("a name outside of its table")?;
    let name = rest.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}
