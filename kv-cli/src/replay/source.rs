//! A trace file as lines: plain text or zstd, read incrementally.
// Reads files that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// The magic number of a zstd frame, and the last 28 bits of that of a skippable frame.
const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
const SKIPPABLE: [u8; 3] = [0x2a, 0x4d, 0x18];

/// Largest line: the ids of the longest request take a quarter of it.
const LINE_BYTES_MAX: u64 = 4 << 20;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Compressed data that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum ZstdError {
    #[error("the zstd data end early")]
    Truncated,
    #[error("the zstd data are damaged")]
    Damaged,
    #[error("the zstd data have checksum {got:08x}, {expected:08x} is noted with them")]
    Checksum { got: u32, expected: u32 },
    #[error("the zstd data need a window of {requested} bytes, at most {max} are possible")]
    Window { requested: u64, max: u64 },
    #[error("the zstd data need dictionary {id}")]
    Dictionary { id: u32 },
}

impl From<FrameDecoderError> for ZstdError {
    fn from(error: FrameDecoderError) -> Self {
        match error {
            FrameDecoderError::WindowSizeTooBig { requested, max } => {
                Self::Window { requested, max }
            }
            FrameDecoderError::DictNotProvided { dict_id } => Self::Dictionary { id: dict_id },
            error => {
                let mut io = anyhow::Chain::new(&error)
                    .filter_map(|cause| cause.downcast_ref::<io::Error>());
                let is_short = io.any(|error| error.kind() == io::ErrorKind::UnexpectedEof);
                if is_short { Self::Truncated } else { Self::Damaged }
            }
        }
    }
}

/// An unsupported encoding, recognised by a file's first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum EncodingError {
    #[error("gzip is not read: unpack the file with gunzip, or compress it with zstd")]
    Gzip,
    #[error("the file is UTF-16 by its byte order mark, expected UTF-8")]
    Utf16,
}

impl EncodingError {
    /// Recognises an encoding by a file's first bytes.
    fn of(start: &[u8]) -> Option<Self> {
        match start {
            [0x1f, 0x8b, ..] => Some(Self::Gzip),
            [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => Some(Self::Utf16),
            _ => None,
        }
    }
}

/// The content of zstd frames, one after another.
///
/// `ruzstd::StreamingDecoder` reads one frame and compares no checksum; the crate `zstd` does both
/// and compiles C. A file may have several frames, with others between them that are to be skipped.
struct Frames<R> {
    source: R,
    decoder: FrameDecoder,
    is_inside: bool,
}

impl<R: BufRead> Frames<R> {
    fn new(source: R) -> Self {
        Self { source, decoder: FrameDecoder::new(), is_inside: false }
    }

    /// Starts the next frame with content; `false` at the end of the data.
    fn enter(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.reset(&mut self.source) {
                Ok(()) => {
                    self.is_inside = true;
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    let skipped = io::copy(&mut (&mut self.source).take(length), &mut io::sink())?;
                    if skipped < length {
                        return Err(io::Error::other(ZstdError::Truncated));
                    }
                }
                Err(error) => return Err(io::Error::other(ZstdError::from(error))),
            }
        }
        Ok(false)
    }

    fn leave(&mut self) -> io::Result<()> {
        self.is_inside = false;
        let decoder = &self.decoder;
        match (decoder.get_calculated_checksum(), decoder.get_checksum_from_data()) {
            (Some(got), Some(expected)) if got != expected => {
                Err(io::Error::other(ZstdError::Checksum { got, expected }))
            }
            _ => Ok(()),
        }
    }
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.is_inside && !self.enter()? {
                return Ok(0);
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                let decoded = self.decoder.decode_blocks(&mut self.source, one);
                decoded.map_err(|error| io::Error::other(ZstdError::from(error)))?;
            }
            match self.decoder.read(out)? {
                0 => self.leave()?,
                read => return Ok(read),
            }
        }
    }
}

/// Lines that are not blank, without surrounding white space.
pub(super) struct Lines {
    input: Box<dyn BufRead>,
    number: u64,
    line: Vec<u8>,
}

/// A line that is longer than any request needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the line is longer than {LINE_BYTES_MAX} bytes")]
struct LineTooLong;

impl Lines {
    /// Opens a file; its name or first bytes show whether it is compressed.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let is_named_zst = path.extension().is_some_and(|ext| ext.eq_ignore_ascii_case("zst"));
        Self::new(BufReader::new(File::open(path)?), is_named_zst)
    }

    fn new(mut input: impl BufRead + 'static, is_zstd: bool) -> io::Result<Self> {
        let start = input.fill_buf()?;
        if let Some(error) = EncodingError::of(start).filter(|_| !is_zstd) {
            return Err(io::Error::other(error));
        }
        let is_skippable = start.first().is_some_and(|first| first & 0xf0 == 0x50)
            && start.get(1..4) == Some(&SKIPPABLE);
        let input: Box<dyn BufRead> = if is_zstd || start.starts_with(&MAGIC) || is_skippable {
            Box::new(BufReader::new(Frames::new(input)))
        } else {
            Box::new(input)
        };
        Ok(Self { input, number: 0, line: Vec::new() })
    }

    /// Returns the number of the last line read, from 1.
    pub(super) fn number(&self) -> u64 {
        self.number.max(1)
    }

    /// Reads the next line that is not blank; `false` at the end of the file.
    pub(super) fn advance(&mut self) -> io::Result<bool> {
        loop {
            self.line.clear();
            // A file without line breaks must not fill the memory.
            let most = LINE_BYTES_MAX.saturating_add(1);
            let read = (&mut self.input).take(most).read_until(b'\n', &mut self.line);
            let has_next = !matches!(read, Ok(0));
            self.number = self.number.saturating_add(u64::from(has_next));
            let read = u64::try_from(read?).unwrap_or(u64::MAX);
            if read > LINE_BYTES_MAX {
                return Err(io::Error::other(LineTooLong));
            }
            if !has_next || !self.text().is_empty() {
                return Ok(has_next);
            }
        }
    }

    /// Returns the last line read.
    pub(super) fn text(&self) -> &[u8] {
        let line = self.line.as_slice();
        let without_mark = line.strip_prefix(BYTE_ORDER_MARK).filter(|_| self.number == 1);
        without_mark.unwrap_or(line).trim_ascii()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::io::Cursor;

    /// `alpha`, `beta` and a checksum, by the zstd program.
    const ZSTD: &[u8] = &[
        0x28, 0xb5, 0x2f, 0xfd, 0x04, 0x58, 0x59, 0x00, 0x00, 0x61, 0x6c, 0x70, 0x68, 0x61, 0x0a,
        0x62, 0x65, 0x74, 0x61, 0x0a, 0x74, 0x6c, 0x52, 0x07,
    ];

    /// Lines of bytes in memory.
    pub(in crate::replay) fn lines(bytes: impl Into<Vec<u8>>) -> Lines {
        Lines::new(Cursor::new(bytes.into()), false).expect("memory can be read")
    }

    fn all(mut lines: Lines) -> io::Result<Vec<(u64, String)>> {
        let mut all = Vec::new();
        while lines.advance()? {
            all.push((lines.number(), String::from_utf8_lossy(lines.text()).into_owned()));
        }
        Ok(all)
    }

    #[test]
    fn blank_lines_marks_and_line_ends_do_not_count() {
        let text = b"\xef\xbb\xbfone\r\n\r\n  \n two \nthree";
        let read = all(lines(text)).expect("lines");
        assert_eq!(read, [(1, "one".into()), (4, "two".into()), (5, "three".into())]);
        assert_eq!(all(lines(b"\xef\xbb\xbf\n\n")).expect("lines"), []);
    }

    #[test]
    fn zstd_is_recognised_and_frames_follow_each_other() {
        let skippable = [&[0x53, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"xyz"].concat();
        let bytes = [&skippable[..], ZSTD, &skippable, ZSTD].concat();
        let read = all(lines(bytes)).expect("lines");
        let words: Vec<_> = read.iter().map(|(_, word)| word.as_str()).collect();
        assert_eq!(words, ["alpha", "beta", "alpha", "beta"]);
    }

    #[test]
    fn every_truncation_is_found() {
        for len in 4..ZSTD.len() {
            let error = all(lines(&ZSTD[..len])).expect_err("truncated").to_string();
            assert_eq!(error, ZstdError::Truncated.to_string(), "{len}");
        }
    }

    #[test]
    fn damage_is_found() {
        let mut bytes = ZSTD.to_vec();
        bytes[12] ^= 1;
        let error = all(lines(bytes)).expect_err("damaged").to_string();
        assert!(error.contains("checksum"), "{error}");
        let named = Lines::new(Cursor::new(b"plain text"), true).expect("opens");
        assert_eq!(all(named).expect_err("no zstd").to_string(), ZstdError::Damaged.to_string());
    }

    #[test]
    fn gzip_and_utf_16_are_named() {
        for (start, words) in [
            (&[0x1f, 0x8b, 8, 0][..], "gunzip"),
            (&[0xff, 0xfe, b'{', 0], "UTF-16"),
            (&[0xfe, 0xff, 0, b'{'], "UTF-16"),
        ] {
            let error = Lines::new(Cursor::new(start.to_vec()), false).err().expect("refused");
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn the_length_of_a_line_is_limited() {
        let max = usize::try_from(LINE_BYTES_MAX).expect("small");
        assert_eq!(all(lines(vec![b'x'; max])).expect("long").len(), 1);
        let error = all(lines(vec![b'x'; max + 1])).expect_err("too long").to_string();
        assert_eq!(error, LineTooLong.to_string());
    }
}
