//! Finds the model that comes with the program.
use std::path::{Path, PathBuf};

use anyhow::bail;

const NAME: &str = "models/stories260K";

/// Returns the given path, or that of the bundled model: in the source tree that the program was
/// built from, above the program, or in the current directory.
pub(crate) fn model_or_bundled(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(path) = given {
        if !path.exists() {
            bail!("{}: no such file or directory", path.display());
        }
        return Ok(path.to_owned());
    }
    let program = std::env::current_exe().ok();
    let above = program.as_deref().map(Path::ancestors).into_iter().flatten().skip(1);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    let places = source.into_iter().chain(above).chain([Path::new(".")]);
    let found = places.map(|place| place.join(NAME)).find(|dir| dir.join("config.json").is_file());
    match found {
        Some(dir) => Ok(dir),
        None => bail!(
            "the bundled model {NAME} is not in the source tree, above the program or in the \
             current directory: give --model DIR"
        ),
    }
}
