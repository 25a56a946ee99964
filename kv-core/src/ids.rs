//! Names of the parts of a cache, each a type of its own: a block is never mistaken for a slot.
use std::fmt;

/// Index of a block inside one group's pool, `0..num_blocks`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(transparent)]
pub struct BlockId(pub u32);

/// One token position in a plane, as `block * block_size + offset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct Slot(pub u32);

/// Transformer layer number, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayerId(pub u16);

/// A set of layers that share geometry, format, pool and block tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(pub u8);

/// One token history, named by the caller; a request may own several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// The K or the V of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "there are exactly two")]
pub enum Plane {
    /// Keys.
    Key,
    /// Values.
    Value,
}

impl fmt::Display for Plane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Key => "K",
            Self::Value => "V",
        })
    }
}

/// What a plane of a layer holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PlaneRole {
    /// Keys, a row for every token.
    Key,
    /// Values, a row for every token.
    Value,
    /// A part of a recurrent state, by number: one tensor of fixed size for every sequence.
    State(u8),
}

impl From<Plane> for PlaneRole {
    fn from(plane: Plane) -> Self {
        match plane {
            Plane::Key => Self::Key,
            Plane::Value => Self::Value,
        }
    }
}

impl fmt::Display for PlaneRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key => Plane::Key.fmt(f),
            Self::Value => Plane::Value.fmt(f),
            Self::State(part) => write!(f, "state part {part}"),
        }
    }
}

impl From<u16> for LayerId {
    fn from(layer: u16) -> Self {
        Self(layer)
    }
}

impl From<u64> for SequenceId {
    fn from(id: u64) -> Self {
        Self(id)
    }
}

macro_rules! display_number {
    ($($name:ident),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}
display_number!(BlockId, Slot, LayerId, GroupId, SequenceId);
