//! The files of one model: a single one, or the parts that `split.count` counts.
// Reads files that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::Content;

use super::GgufError;
use super::metadata::whole;
use crate::error::{Error, InFile};

/// One file and its parsed head.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) path: PathBuf,
    pub(super) file: BufReader<File>,
    pub(super) content: Content,
}

impl Part {
    /// Reads the head of a file.
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        let mut file = BufReader::new(File::open(path).in_file(path)?);
        let content = Content::read(&mut file)
            .map_err(|error| GgufError::NotReadable { source: error.into() })
            .in_file(path)?;
        Ok(Self { path: path.to_owned(), file, content })
    }

    fn number(&self, key: &str) -> Option<u32> {
        self.content.metadata.get(key).and_then(whole)
    }

    /// Returns the number of files of the model, and the index of this one.
    fn place(&self) -> (u32, u32) {
        let count = self.number("split.count").unwrap_or(1).max(1);
        (count, self.number("split.no").unwrap_or(0))
    }
}

/// Opens the first file of a model, which describes all of it.
pub(super) fn first(path: &Path) -> Result<Part, Error> {
    let part = Part::open(path)?;
    let (count, index) = part.place();
    if count > 1 && index > 0 {
        let number = index.saturating_add(1);
        let first = name_of(path, 1, count).unwrap_or_else(|| "the first".to_owned());
        return Err(GgufError::NotFirst { number, count, first }).in_file(path);
    }
    Ok(part)
}

/// Opens all files of a model, in order.
pub(super) fn all(path: &Path) -> Result<Vec<Part>, Error> {
    let first = first(path)?;
    let (count, _) = first.place();
    let mut parts = vec![first];
    for number in 2..=count {
        let name = name_of(path, number, count).ok_or(GgufError::Name { count });
        let name = name.in_file(path)?;
        let path = path.with_file_name(&name);
        if !path.is_file() {
            return Err(GgufError::MissingPart { number, count }).in_file(&path);
        }
        let part = Part::open(&path)?;
        let index = number.saturating_sub(1);
        if part.place() != (count, index) {
            let (got_count, got) = part.place();
            let got = got.saturating_add(1);
            let wrong = GgufError::WrongPart { got, got_count, expected: number, count };
            return Err(wrong).in_file(&path);
        }
        parts.push(part);
    }
    Ok(parts)
}

/// Returns the name of another part of the same model.
fn name_of(path: &Path, number: u32, count: u32) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(&format!("-of-{count:05}.gguf"))?;
    let (stem, digits) = stem.rsplit_once('-')?;
    let is_number = digits.len() >= 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| format!("{stem}-{number:05}-of-{count:05}.gguf"))
}

/// Returns whether a file name is that of a further part of a split model, such as
/// `llama-00002-of-00003.gguf`.
pub fn is_further_part(path: &Path) -> bool {
    let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
    let place = name.rsplit_once("-of-").and_then(|(stem, count)| {
        let (_, number) = stem.rsplit_once('-')?;
        Some((number.parse::<u32>().ok()?, count.parse::<u32>().ok()?))
    });
    place.is_some_and(|(number, _)| number > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_found_by_their_names() {
        let name = |path: &str, number, count| name_of(Path::new(path), number, count);
        let first = "/m/llama-00001-of-00003.gguf";
        assert_eq!(name(first, 2, 3).as_deref(), Some("llama-00002-of-00003.gguf"));
        assert_eq!(name("a-00003-of-00003.gguf", 1, 3).as_deref(), Some("a-00001-of-00003.gguf"));
        for path in ["llama.gguf", "a-00001-of-00004.gguf", "a-1-of-00003.gguf", "-of-00003.gguf"] {
            assert_eq!(name(path, 2, 3), None, "{path}");
        }
        for (path, further) in [
            ("a-00001-of-00003.gguf", false),
            ("a-00002-of-00003.gguf", true),
            ("a.gguf", false),
            ("a-of-b.gguf", false),
        ] {
            assert_eq!(is_further_part(Path::new(path)), further, "{path}");
        }
    }
}
