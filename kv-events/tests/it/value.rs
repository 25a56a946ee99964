//! A reader of MessagePack, written from its specification: an oracle of the bytes on the wire.

/// One value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    Nil,
    Uint(u64),
    Float(f64),
    Text(String),
    List(Vec<Self>),
    Map(Vec<(String, Self)>),
}

impl Value {
    /// Reads one value that is all of `bytes`.
    pub(crate) fn read(mut bytes: &[u8]) -> Self {
        let value = Self::next(&mut bytes);
        assert!(bytes.is_empty(), "bytes after the value");
        value
    }

    fn next(bytes: &mut &[u8]) -> Self {
        let code = take(bytes, 1)[0];
        let number = |bytes: &mut &[u8], len| {
            take(bytes, len).iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
        };
        let small = |bits: u8| u64::from(code & bits);
        match code {
            0x00..=0x7f => Self::Uint(code.into()),
            0xcc..=0xcf => Self::Uint(number(bytes, 1 << (code - 0xcc))),
            0xc0 => Self::Nil,
            0xcb => Self::Float(f64::from_bits(number(bytes, 8))),
            0xa0..=0xbf => Self::text(small(0x1f), bytes),
            0xd9..=0xdb => {
                let len = number(bytes, 1 << (code - 0xd9));
                Self::text(len, bytes)
            }
            0x90..=0x9f => Self::list(small(0xf), bytes),
            0xdc..=0xdd => {
                let len = number(bytes, 2 << (code - 0xdc));
                Self::list(len, bytes)
            }
            0x80..=0x8f => Self::Map(
                (0..small(0xf))
                    .map(|_| match Self::next(bytes) {
                        Self::Text(key) => (key, Self::next(bytes)),
                        key => panic!("{key:?} is not a key"),
                    })
                    .collect(),
            ),
            code => panic!("{code:x} is nothing that events need"),
        }
    }

    fn text(len: u64, bytes: &mut &[u8]) -> Self {
        let bytes = take(bytes, usize::try_from(len).unwrap());
        Self::Text(String::from_utf8(bytes.to_vec()).unwrap())
    }

    fn list(len: u64, bytes: &mut &[u8]) -> Self {
        Self::List((0..len).map(|_| Self::next(bytes)).collect())
    }

    pub(crate) fn uint(&self) -> u64 {
        match self {
            Self::Uint(value) => *value,
            other => panic!("{other:?} is not a number"),
        }
    }

    pub(crate) fn str(&self) -> &str {
        match self {
            Self::Text(text) => text,
            other => panic!("{other:?} is not a text"),
        }
    }

    pub(crate) fn items(&self) -> &[Self] {
        match self {
            Self::List(items) => items,
            other => panic!("{other:?} is not a list"),
        }
    }

    pub(crate) fn keys(&self) -> Vec<&str> {
        match self {
            Self::Map(pairs) => pairs.iter().map(|(key, _)| key.as_str()).collect(),
            other => panic!("{other:?} is not a map"),
        }
    }

    pub(crate) fn get(&self, name: &str) -> &Self {
        match self {
            Self::Map(pairs) => &pairs.iter().find(|(key, _)| key == name).unwrap().1,
            other => panic!("{other:?} is not a map"),
        }
    }
}

fn take<'a>(bytes: &mut &'a [u8], len: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at(len);
    *bytes = rest;
    taken
}
