//! The figures of a kernel's main loop, and how they are written down.
use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context, Result, bail};

use super::cubin::Resources;
use super::family::{Family, Shape};
use super::flow::Flow;
use super::pipes::{self, Class, TENSOR_CYCLES};
use super::sass::Kernel;
use super::trip;

/// What the gate knows of a kernel.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Figures {
    pub(super) shape: Shape,
    pub(super) resources: Resources,
    /// Instructions of a trip of the main loop.
    pub(super) instructions: u32,
    /// The fewest before and after the loop.
    pub(super) before: u32,
    pub(super) after: u32,
    /// Bytes of the different instructions of a trip.
    pub(super) code_bytes: u32,
    pub(super) counts: BTreeMap<Class, u32>,
    /// Bytes of K and V that a warp reads in a trip.
    pub(super) bytes: u32,
    /// Cycles of a trip where warps of two thread blocks share a scheduler, and of one block.
    pub(super) cycles: f64,
    pub(super) cycles_alone: f64,
}

/// Clock of the model, in Hz, and multiprocessors of an H100 and H200.
pub(crate) const CLOCK: f64 = 1.98e9;
pub(crate) const MULTIPROCESSORS: f64 = 132.0;
/// Bytes per second of a copy from device memory to device memory: each byte read and written.
pub(crate) const COPY_H200: f64 = 4.3e12;

impl Figures {
    /// Reads a kernel.
    ///
    /// # Errors
    /// Names a kernel without its main loop, or an instruction that no table lists.
    pub(super) fn new(
        kernel: &Kernel,
        shape: &Shape,
        resources: Option<&Resources>,
    ) -> Result<Self> {
        let flow = Flow::new(kernel)?;
        for one in &kernel.instructions {
            pipes::cost(one)?;
        }
        let trip = trip::find(&flow, &shape.passes())?;
        let resources = *resources.context("its registers are not in the unit")?;
        let warps = shape.warps();
        let cycles = pipes::simulate(&trip.instructions, warps)?;
        let alone = warps.div_ceil(2);
        Ok(Self {
            shape: shape.clone(),
            resources,
            instructions: u32::try_from(trip.instructions.len())?,
            before: trip.before,
            after: trip.after,
            code_bytes: trip.code_bytes,
            counts: pipes::count(&trip.instructions)?,
            bytes: shape.bytes(),
            cycles,
            cycles_alone: pipes::simulate(&trip.instructions, alone)?,
        })
    }

    pub(super) fn count(&self, class: Class) -> u32 {
        self.counts.get(&class).copied().unwrap_or(0)
    }

    /// Returns the compute side of a trip over the time in which an H200 copies its bytes.
    pub(super) fn of_memory(&self) -> f64 {
        let per_cycle = COPY_H200 / MULTIPROCESSORS / CLOCK;
        let bytes = f64::from(self.bytes) * f64::from(self.shape.warps()) * SCHEDULERS;
        self.cycles / (bytes / per_cycle)
    }

    /// Returns the cycles in which 64 query rows see 64 tokens, in prefill.
    pub(super) fn of_square(&self) -> f64 {
        self.cycles / self.shape.squares()
    }

    /// Returns the part of the time in which the tensor pipe is busy.
    pub(super) fn of_tensor(&self) -> f64 {
        let products = self.count(Class::Hmma) * self.shape.warps();
        f64::from(products) * TENSOR_CYCLES / self.cycles
    }
}

/// Schedulers of a multiprocessor.
const SCHEDULERS: f64 = 4.0;

/// Classes with a column in both tables.
const COLUMNS: [Class; 12] = [
    Class::Hmma,
    Class::Ldsm,
    Class::Lds,
    Class::Sts,
    Class::Ldgsts,
    Class::Ldg,
    Class::Stg,
    Class::Shfl,
    Class::Mufu,
    Class::F2fp,
    Class::Float,
    Class::Int,
];

/// Formats the tables: decode, then prefill.
pub(super) fn markdown(all: &[Figures]) -> String {
    let mut text = String::new();
    for (is_decode, last) in [(true, "of memory"), (false, "of tensor | 64 x 64")] {
        let classes = COLUMNS.map(Class::name).join(" | ");
        let heads = format!(
            "| kernel | registers | before | trip | after | code | {classes} | bytes | clk | alone \
             | {last} |"
        );
        let dashes = "---|".repeat(heads.matches('|').count() - 1);
        let _ = writeln!(text, "{heads}\n|{dashes}");
        for one in all.iter().filter(|one| one.shape.is_decode() == is_decode) {
            let _ = writeln!(text, "{}", row(one));
        }
        if is_decode {
            text.push('\n');
        }
    }
    text
}

fn row(one: &Figures) -> String {
    let counts = COLUMNS.map(|class| one.count(class).to_string()).join(" | ");
    let last = if one.shape.is_decode() {
        format!("{:.2}", one.of_memory())
    } else {
        format!("{:.2} | {:.0}", one.of_tensor(), one.of_square())
    };
    format!(
        "| `{}` | {} | {} | {} | {} | {} | {counts} | {} | {:.0} | {:.0} | {last} |",
        one.shape,
        one.resources.registers,
        one.before,
        one.instructions,
        one.after,
        one.code_bytes,
        one.bytes,
        one.cycles,
        one.cycles_alone,
    )
}

/// Formats the constants from which the report of a card takes its predictions.
pub(super) fn constants(all: &[Figures]) -> String {
    let mut text = "\
//! Main loops of kernels in the machine code for `sm_90a`, written by `cargo xtask gate --update`.
//! A stage of `cargo xtask test` compares them with the archive.
use super::predict::Loop;

/// Decode and prefill kernels with a head dim of 128.
#[rustfmt::skip]
pub(super) const LOOPS: &[Loop] = &[
"
    .to_owned();
    for one in all.iter().filter(|one| one.shape.head_dim == 128) {
        // Codes in prefill have no prediction: their time depends on the format.
        if matches!(one.shape.family, Family::PrefillStaged(_) | Family::PrefillCoded) {
            continue;
        }
        let _ = writeln!(
            text,
            "    Loop {{ kernel: \"{}\", bytes: {}, cycles: {:.1}, cycles_alone: {:.1} }},",
            one.shape, one.bytes, one.cycles, one.cycles_alone
        );
    }
    text.push_str("];\n");
    text
}

const BEGIN: &str = "<!-- gate: begin -->\n";
const END: &str = "<!-- gate: end -->\n";

/// Replaces the tables of a document.
///
/// # Errors
/// If the document does not have both markers.
pub(super) fn replaced(document: &str, tables: &str) -> Result<String> {
    let (head, _, tail) = parts(document)?;
    Ok(format!("{head}{BEGIN}{tables}{END}{tail}"))
}

/// Compares the tables of a document; each difference is one line.
pub(super) fn differences(document: &str, tables: &str) -> Result<Vec<String>> {
    let (_, before, _) = parts(document)?;
    let rows = |text: &str| -> BTreeMap<String, String> {
        let rows = text.lines().filter(|line| line.starts_with("| `"));
        rows.filter_map(|row| {
            let name = row.split('`').nth(1)?;
            Some((name.to_owned(), row.to_owned()))
        })
        .collect()
    };
    let (known, now) = (rows(before), rows(tables));
    let mut found = Vec::new();
    for (name, row) in &now {
        match known.get(name) {
            Some(other) if other == row => {}
            Some(other) => found.push(format!("was {other}\nis  {row}")),
            None => found.push(format!("{name} has no row")),
        }
    }
    found.extend(
        known
            .keys()
            .filter(|name| !now.contains_key(*name))
            .map(|name| format!("{name} has a row, and no machine code")),
    );
    if found.is_empty() && before != tables {
        found.push("the columns differ".to_owned());
    }
    Ok(found)
}

fn parts(document: &str) -> Result<(&str, &str, &str)> {
    let parts = document.split_once(BEGIN);
    let parts = parts.and_then(|(head, rest)| Some((head, rest.split_once(END)?)));
    let Some((head, (tables, tail))) = parts else {
        bail!("no {} and {} in it", BEGIN.trim(), END.trim());
    };
    Ok((head, tables, tail))
}
