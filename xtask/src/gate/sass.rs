//! Parses disassembled machine code: the output of `nvdisasm -c -hex` for one unit.
//!
//! An instruction has 128 bits, printed as two words. The upper one holds the control code: how
//! long the scheduler waits before the next instruction of the warp, which of six scoreboards the
//! instruction sets, and for which it waits first. Owns no knowledge of single instructions.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use anyhow::{Context, Result, bail};

/// Bytes of an instruction.
pub(super) const INSTRUCTION_BYTES: u32 = 16;

/// The code of one kernel, with the functions that it calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Kernel {
    pub(super) name: String,
    pub(super) instructions: Vec<Instruction>,
}

/// One instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Instruction {
    /// Offset from the kernel's begin, in bytes.
    pub(super) address: u32,
    /// Labels of this address, by which branches and calls name it.
    pub(super) labels: Vec<String>,
    /// Whether a predicate decides if it has an effect.
    pub(super) is_predicated: bool,
    /// Its name with modifiers, such as `LDG.E.128`.
    pub(super) opcode: String,
    /// Operands as printed.
    pub(super) operands: String,
    pub(super) control: Control,
}

impl Instruction {
    /// Returns the name without modifiers.
    pub(super) fn base(&self) -> &str {
        self.opcode.split('.').next().unwrap_or_default()
    }

    /// Returns whether the opcode has a modifier.
    pub(super) fn has(&self, modifier: &str) -> bool {
        self.opcode.split('.').skip(1).any(|own| own == modifier)
    }
}

/// The control code of an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Control {
    /// Cycles until the warp may issue its next instruction.
    pub(super) stall: u32,
    /// The scoreboard that is released when the result has been written.
    pub(super) sets_on_write: Option<u32>,
    /// The scoreboard that is released when the operands have been read.
    pub(super) sets_on_read: Option<u32>,
    /// A bit for each scoreboard that the instruction waits for.
    pub(super) waits_for: u32,
}

impl Control {
    fn parse(word: u64) -> Self {
        let field = |shift: u32, mask: u64| u32::try_from(word >> shift & mask).unwrap_or_default();
        let scoreboard = |shift| Some(field(shift, 7)).filter(|index| *index < SCOREBOARDS);
        Self {
            stall: field(41, 15),
            sets_on_write: scoreboard(46),
            sets_on_read: scoreboard(49),
            waits_for: field(52, 63),
        }
    }
}

/// Scoreboards of a warp; 7 in a control code stands for none.
pub(super) const SCOREBOARDS: u32 = 6;

/// Parses a unit.
///
/// # Errors
/// Names the kernel and the line that is not understood, or is missing.
pub(super) fn parse(text: &str) -> Result<Vec<Kernel>> {
    let mut kernels: Vec<Kernel> = Vec::new();
    let mut section = Section::default();
    for (number, line) in (1_usize..).zip(text.lines()) {
        let name = section.name().to_owned();
        if let Some(kernel) = section.read(line).with_context(|| at(&name, number))? {
            kernels.push(kernel);
        }
    }
    let name = section.name().to_owned();
    kernels.extend(section.end().with_context(|| format!("{name}, at the end"))?);
    if kernels.is_empty() {
        bail!("no kernel in the disassembly");
    }
    Ok(kernels)
}

fn at(kernel: &str, line: usize) -> String {
    if kernel.is_empty() { format!("line {line}") } else { format!("{kernel}, line {line}") }
}

/// The section that is being read; without a kernel, lines are skipped.
#[derive(Default)]
struct Section {
    kernel: Option<Kernel>,
    labels: Vec<String>,
    /// The instruction whose second word is on the next line.
    half: Option<Instruction>,
}

impl Section {
    fn name(&self) -> &str {
        self.kernel.as_ref().map_or("", |kernel| &kernel.name)
    }

    /// Reads a line; returns the kernel that it ends.
    fn read(&mut self, line: &str) -> Result<Option<Kernel>> {
        let trimmed = line.trim();
        if let Some(rest) = trimmed.strip_prefix(".section") {
            let ended = self.end()?;
            let name = rest.trim_start().split(',').next().unwrap_or_default();
            self.kernel = name
                .strip_prefix(".text.")
                .map(|name| Kernel { name: name.to_owned(), instructions: Vec::new() });
            return Ok(ended);
        }
        if self.kernel.is_none() || trimmed.is_empty() || trimmed.starts_with("//") {
            return Ok(None);
        }
        if trimmed.starts_with("/*") {
            self.instruction(trimmed)?;
        } else if let Some(label) = trimmed.strip_suffix(':') {
            if self.half.is_some() {
                bail!("a label between the words of an instruction");
            }
            self.labels.push(label.to_owned());
        } else if !DIRECTIVES.iter().any(|known| trimmed.starts_with(known)) {
            bail!("not understood: {trimmed:?}");
        }
        Ok(None)
    }

    /// Reads the first or second line of an instruction.
    fn instruction(&mut self, line: &str) -> Result<()> {
        if let Some(half) = self.half.take() {
            let (_, second) = word(line)?
                .filter(|(text, _)| text.is_empty())
                .with_context(|| format!("{:#x} has no second word", half.address))?;
            let control = Control::parse(second);
            if let Some(kernel) = &mut self.kernel {
                kernel.instructions.push(Instruction { control, ..half });
            }
            return Ok(());
        }
        let (text, _) = word(line)?.context("an instruction without its word")?;
        let (address, text) =
            text.strip_prefix("/*").and_then(|text| text.split_once("*/")).context("no address")?;
        let address = u32::from_str_radix(address, 16)
            .with_context(|| format!("{address:?} is no address"))?;
        let before = self.kernel.as_ref().and_then(|kernel| kernel.instructions.last());
        let expected =
            before.map_or(Some(0), |before| before.address.checked_add(INSTRUCTION_BYTES));
        if Some(address) != expected {
            bail!("address {address:#x} does not follow");
        }
        // The targets of an indirect branch follow as a comment, before the semicolon.
        let text = text.trim().trim_end_matches(';').trim_end();
        let (guard, text) = match text.strip_prefix('@') {
            Some(text) => text.split_once(' ').context("a predicate alone")?,
            None => ("PT", text),
        };
        let (opcode, operands) = text.trim_start().split_once(' ').unwrap_or((text.trim(), ""));
        let is_name = |letter: char| letter.is_ascii_alphanumeric() || ['.', '_'].contains(&letter);
        if !opcode.starts_with(|first: char| first.is_ascii_uppercase())
            || !opcode.chars().all(is_name)
        {
            bail!("{opcode:?} is no opcode");
        }
        self.half = Some(Instruction {
            address,
            labels: std::mem::take(&mut self.labels),
            is_predicated: guard != "PT",
            opcode: opcode.to_owned(),
            operands: operands.trim().to_owned(),
            control: Control::default(),
        });
        Ok(())
    }

    fn end(&mut self) -> Result<Option<Kernel>> {
        if let Some(half) = self.half.take() {
            bail!("the instruction at {:#x} has no second word", half.address);
        }
        let kernel = self.kernel.take();
        if let Some(kernel) = &kernel
            && kernel.instructions.is_empty()
        {
            bail!("{} has no instruction", kernel.name);
        }
        // Labels of a section's end belong to no instruction.
        self.labels.clear();
        Ok(kernel)
    }
}

/// Splits a line at the comment with a 64-bit word that ends it.
fn word(line: &str) -> Result<Option<(&str, u64)>> {
    let Some((text, word)) = line.strip_suffix("*/").and_then(|line| line.rsplit_once("/*")) else {
        return Ok(None);
    };
    let digits = word.trim().strip_prefix("0x").filter(|digits| digits.len() == 16);
    let digits = digits.with_context(|| format!("{:?} is no word", word.trim()))?;
    Ok(Some((text, u64::from_str_radix(digits, 16).context("a word of other digits")?)))
}

/// Starts of lines in a kernel's section that are neither labels nor instructions.
const DIRECTIVES: [&str; 8] =
    [".align", ".global", ".weak", ".type", ".size", ".other", ".target", ".elftype"];
