//! `kv calibrate`: writes the constants of quantised storage to a file.
use std::fs;
use std::path::Path;

use anyhow::Context;
use kv_runner::calibrate;
use serde::Serialize;

use crate::args::CalibrateArgs;
use crate::loaded::Loaded;
use crate::num::to_usize;
use crate::{output, progress};

/// The object that `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    file: String,
    model: String,
    /// The fingerprint of the model.
    fingerprint: String,
    /// Tokens that were counted: those of the text without the full-precision prefix.
    tokens: u32,
    layers: u16,
    kv_heads: u32,
    head_dim: u32,
    bytes: usize,
}

pub(crate) fn run(args: &CalibrateArgs) -> anyhow::Result<()> {
    output::check_writable(&args.output)?;
    let loaded = Loaded::open(&args.model)?;
    let mut ids = loaded.read_tokens(&args.text)?;
    ids.truncate(to_usize(args.tokens));
    let Loaded { name, model, backend, .. } = &loaded;
    let calibrators = progress::calibrate(model, backend, &ids, &[args.full_precision_prefix])?;
    let calibrator = calibrators.first().context("one was made for one full-precision prefix")?;
    let describe = || args.text.display().to_string();
    let bytes = calibrate::to_file(calibrator, model).with_context(describe)?;
    write(&args.output, &bytes).with_context(|| args.output.display().to_string())?;
    let config = model.config();
    let report = Report {
        file: args.output.display().to_string(),
        model: name.clone(),
        fingerprint: model.fingerprint(),
        tokens: calibrator.num_tokens(),
        layers: config.layers(),
        kv_heads: config.kv_heads(),
        head_dim: config.head_dim(),
        bytes: bytes.len(),
    };
    if args.json {
        return output::json(&report);
    }
    output::text(&format!(
        "{}: constants of {} layers, {} kv heads of {}, from {} tokens of {} read by {name}\n",
        report.file,
        report.layers,
        report.kv_heads,
        report.head_dim,
        report.tokens,
        args.text.display(),
    ))
}

/// Writes the file whole or not at all: an existing file stays until the new one is complete.
fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let written = fs::write(&partial, bytes).and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        // The file may not exist.
        let _ = fs::remove_file(&partial);
    }
    written
}
