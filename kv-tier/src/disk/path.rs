//! Paths of chunks below the folder of a store, and names of files parsed back to chunk names.
use kv_core::invariant::Invariant;

use crate::{ChunkAddress, ChunkName};

/// The end of the name of a file that is still being written.
pub(super) const TEMPORARY: &str = ".tmp";
/// The beginning of the names of the store's own files.
pub(super) const OWN: &str = "kv-tier";

/// Returns the path of a chunk: `root/ab/cd/abcd...`, all in lower-case hexadecimal digits.
pub(super) fn of(chunk: &ChunkAddress) -> String {
    let (root, name) = (chunk.root, chunk.name.to_string());
    let level = |at: usize| name.get(at..at + 2).invariant("a name has 64 digits");
    format!("{root}/{}/{}/{name}", level(0), level(2))
}

/// Returns the folder of a path.
pub(super) fn folder(path: &str) -> &str {
    path.rsplit_once('/').map_or(".", |(folder, _)| folder)
}

/// Returns the name that 64 lower-case hexadecimal digits stand for.
pub(super) fn parse(digits: &[u8]) -> Option<ChunkName> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Returns whether this is the name of a folder between a root and its files.
pub(super) fn is_level(name: &[u8]) -> bool {
    let is_digit = |digit: &u8| matches!(digit, b'0'..=b'9' | b'a'..=b'f');
    name.len() == 2 && name.iter().all(is_digit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_has_the_names_of_its_chunk() {
        let mut name = [0xab; 32];
        name[1] = 0x0c;
        let chunk = ChunkAddress { root: ChunkName::new([0xf1; 32]), name: ChunkName::new(name) };
        let path = of(&chunk);
        assert_eq!(path, format!("{}/ab/0c/{}", chunk.root, chunk.name));
        assert_eq!(path.len(), 64 + 1 + 2 + 1 + 2 + 1 + 64);
        assert_eq!(folder(&path), format!("{}/ab/0c", chunk.root));
        assert_eq!(parse(chunk.name.to_string().as_bytes()), Some(chunk.name));
    }

    #[test]
    fn other_names_are_no_chunks() {
        let name = ChunkName::new([0xab; 32]).to_string();
        for other in [&name[1..], &name.to_uppercase(), &format!("{name}.tmp"), "", "kv-tier.json"]
        {
            assert_eq!(parse(other.as_bytes()), None, "{other}");
        }
        assert!(is_level(b"0f") && !is_level(b"0F") && !is_level(b"0") && !is_level(b"000"));
    }
}
