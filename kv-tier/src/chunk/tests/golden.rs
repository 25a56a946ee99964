//! Chunks in `testdata`: version 1 is read for ever, and written the same by everybody.
use std::fs;
use std::path::{Path, PathBuf};

use super::*;

fn path(format: KvFormat) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("testdata/v1-{format}.kvchunk"))
}

/// The second chunk of a prompt with two images.
fn golden(format: KvFormat) -> Fixture {
    Fixture::new(&tiny(format), 1, 43)
}

#[test]
fn golden_chunks_are_written_and_read() {
    for format in [KvFormat::Bf16, L4] {
        let (fixture, path) = (golden(format), path(format));
        if !path.exists() {
            fs::write(&path, fixture.chunk()).unwrap();
            panic!("{} was written: check it in", path.display());
        }
        let file = fs::read(&path).unwrap();
        assert!(file == fixture.chunk(), "{format}: a change of the format needs a new version");
        verify(&file, &fixture.expectation()).unwrap();
    }
}

/// Every field at its place, without the code that writes it.
#[test]
fn a_golden_chunk_is_as_drawn() {
    let file = fs::read(path(L4)).unwrap();
    let u32_at = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(file[at..at + 8].try_into().unwrap());
    let text = |at: usize, len: usize| std::str::from_utf8(&file[at..at + len]).unwrap();
    assert_eq!(file.len(), 4096 + 12288);
    assert_eq!((text(0, 8), u32_at(8), u32_at(12)), ("KVCHUNK1", 0x0001_0001, 0));
    assert_eq!(file[144..160], 0x0123_4567_89ab_cdef_u128.to_le_bytes());
    // Group, layers, heads, head_dims, block size, blocks, first block.
    let numbers: Vec<_> = (176..216).step_by(4).map(u32_at).collect();
    assert_eq!(numbers, [0, 1, 0, 1, 1, 32, 32, 4, 64, 64]);
    assert_eq!((text(216, 4), text(248, 4)), ("l4\0\0", "l4\0\0"));
    // 4 rows of 18 bytes; Hnd; reserved.
    assert_eq!((u64_at(280), u64_at(288), u32_at(296), u32_at(300)), (72, 72, 1, 0));
    assert_eq!((u64_at(304), u64_at(320)), (12288, 1_700_000_000));
    assert_eq!(u64_at(312), crc(&file[4096..]));
    assert_eq!((u32_at(328), u32_at(332)), (256, 2));
    // The first image began 2 tokens before the chunk: block, id, inside, offset, length.
    let content = 336 + 4 * 256;
    assert_eq!(u32_at(content), 0);
    assert_eq!([20, 24, 28].map(|at| u32_at(content + at)), [0, 2, 4]);
    assert_eq!(u32_at(content + 32), 1);
    assert_eq!([20, 24, 28].map(|at| u32_at(content + 32 + at)), [1, 0, 1]);
    assert!(file[content + 64..4088].iter().all(|byte| *byte == 0));
    assert_eq!(u64_at(4088), crc(&file[..4088]));
    // A piece of 72 bytes and a gap of 8.
    assert!(file[4096 + 72..4096 + 80].iter().all(|byte| *byte == 0));
}
