//! A writer of MessagePack: the few types that events are made of.
//!
//! Numbers and lengths take their shortest form, which every reader knows.

/// Bytes of MessagePack that grow value by value.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// Returns what was written.
    pub(crate) fn finish(self) -> Vec<u8> {
        self.bytes
    }

    /// Writes nil.
    pub(crate) fn nil(&mut self) {
        self.bytes.push(0xc0);
    }

    /// Writes a number of 64 bits.
    pub(crate) fn float(&mut self, value: f64) {
        self.bytes.push(0xcb);
        self.bytes.extend(value.to_be_bytes());
    }

    /// Writes a number.
    pub(crate) fn uint(&mut self, value: u64) {
        if let Ok(value) = u8::try_from(value) {
            if value >= 0x80 {
                self.bytes.push(0xcc);
            }
            self.bytes.push(value);
        } else if let Ok(value) = u16::try_from(value) {
            self.bytes.push(0xcd);
            self.bytes.extend(value.to_be_bytes());
        } else if let Ok(value) = u32::try_from(value) {
            self.bytes.push(0xce);
            self.bytes.extend(value.to_be_bytes());
        } else {
            self.bytes.push(0xcf);
            self.bytes.extend(value.to_be_bytes());
        }
    }

    /// Writes a text.
    pub(crate) fn text(&mut self, text: &str) {
        match u8::try_from(text.len()) {
            Ok(len) if len < 32 => self.bytes.push(0xa0 | len),
            Ok(len) => self.bytes.extend([0xd9, len]),
            Err(_) => self.length(text.len(), [0xda, 0xdb]),
        }
        self.bytes.extend(text.as_bytes());
    }

    /// Begins a list of `len` values.
    pub(crate) fn list(&mut self, len: usize) {
        match u8::try_from(len) {
            Ok(len) if len < 16 => self.bytes.push(0x90 | len),
            _ => self.length(len, [0xdc, 0xdd]),
        }
    }

    /// Begins a map of `len` keys, each with its value after it.
    pub(crate) fn map(&mut self, len: usize) {
        match u8::try_from(len) {
            Ok(len) if len < 16 => self.bytes.push(0x80 | len),
            _ => self.length(len, [0xde, 0xdf]),
        }
    }

    /// Writes a list of numbers.
    pub(crate) fn uints(&mut self, values: impl ExactSizeIterator<Item = u64>) {
        self.list(values.len());
        values.for_each(|value| self.uint(value));
    }

    /// Writes a length of 16 or 32 bits after the code for it. The bounds of a batch keep longer
    /// ones out.
    fn length(&mut self, len: usize, [short, long]: [u8; 2]) {
        if let Ok(len) = u16::try_from(len) {
            self.bytes.push(short);
            self.bytes.extend(len.to_be_bytes());
        } else {
            self.bytes.push(long);
            self.bytes.extend(u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(write: impl FnOnce(&mut Writer)) -> Vec<u8> {
        let mut writer = Writer::default();
        write(&mut writer);
        writer.finish()
    }

    #[test]
    fn numbers_take_their_shortest_form() {
        let cases: [(u64, &[u8]); 8] = [
            (0, &[0]),
            (127, &[0x7f]),
            (128, &[0xcc, 0x80]),
            (255, &[0xcc, 0xff]),
            (256, &[0xcd, 1, 0]),
            (65_536, &[0xce, 0, 1, 0, 0]),
            (1 << 32, &[0xcf, 0, 0, 0, 1, 0, 0, 0, 0]),
            (u64::MAX, &[0xcf, 255, 255, 255, 255, 255, 255, 255, 255]),
        ];
        for (value, expected) in cases {
            assert_eq!(written(|w| w.uint(value)), expected, "{value}");
        }
    }

    #[test]
    fn lengths_take_their_shortest_form() {
        for (len, expected) in [(0, vec![0x90]), (15, vec![0x9f]), (16, vec![0xdc, 0, 16])] {
            assert_eq!(written(|w| w.list(len)), expected);
        }
        assert_eq!(written(|w| w.list(70_000)), [0xdd, 0, 1, 0x11, 0x70]);
        assert_eq!(written(|w| w.map(3)), [0x83]);
        assert_eq!(written(|w| w.map(16)), [0xde, 0, 16]);
        for (len, head) in [(31, vec![0xbf]), (32, vec![0xd9, 32]), (300, vec![0xda, 1, 44])] {
            let text = "x".repeat(len);
            assert_eq!(written(|w| w.text(&text)), [&head, text.as_bytes()].concat());
        }
        assert_eq!(written(|w| w.uints([1, 200].into_iter())), [0x92, 1, 0xcc, 200]);
        assert_eq!(written(Writer::nil), [0xc0]);
        assert_eq!(written(|w| w.float(1.0)), [0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0]);
    }
}
