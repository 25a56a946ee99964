//! Views of planes for backends: layouts, and buffers that may be type-erased.
use std::any::Any;

use super::erased::AnyBuffer;
use super::planes::KvStorage;
use super::roles::BlockPlanes;
#[cfg(doc)]
use crate::calibration::PlaneConstants;
use crate::error::{DeviceError, DeviceErrorKind, PlanError};
use crate::geometry::PlaneLayout;
use crate::num::to_u64;

/// One plane: its layout, and the buffers that hold it.
#[derive(Debug)]
pub struct PlaneView<'a, Buf> {
    pub(super) layout: PlaneLayout,
    pub(super) segments: Handles<'a, Buf>,
    /// None or one buffer.
    pub(super) constants: Handles<'a, Buf>,
}

/// Buffers of a plane. Erased buffers are cast one by one on access, which needs no second list.
#[derive(Debug)]
pub(super) enum Handles<'a, Buf> {
    Direct(&'a [Buf]),
    Erased(&'a [AnyBuffer], Erasures),
}

/// Number of times that a buffer was erased: more than 1 if a backend wraps an erased buffer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Erasures(u8);

impl Erasures {
    const ONE: Self = Self(1);

    fn one_more(self) -> Self {
        Self(self.0 + 1)
    }
    fn undo<T: Any>(self, buffer: &AnyBuffer) -> Option<&T> {
        let mut inner = buffer;
        for _ in 1..self.0 {
            inner = inner.downcast_ref()?;
        }
        inner.downcast_ref()
    }
}

impl<Buf> Clone for PlaneView<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Buf> Copy for PlaneView<'_, Buf> {}
impl<Buf> Clone for Handles<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Buf> Copy for Handles<'_, Buf> {}

impl<'a, Buf> Handles<'a, Buf> {
    fn len(&self) -> usize {
        match self {
            Self::Direct(buffers) => buffers.len(),
            Self::Erased(buffers, _) => buffers.len(),
        }
    }
    fn get(&self, index: usize) -> Option<&'a Buf>
    where
        Buf: Any,
    {
        match self {
            Self::Direct(buffers) => buffers.get(index),
            Self::Erased(buffers, erasures) => erasures.undo(buffers.get(index)?),
        }
    }
}

impl<'a> Handles<'a, AnyBuffer> {
    /// Returns the buffers with a backend's own type; `None` if one belongs to another backend.
    fn downcast<T: Any>(self) -> Option<Handles<'a, T>> {
        let (buffers, erasures) = match self {
            Self::Direct(buffers) => (buffers, Erasures::ONE),
            Self::Erased(buffers, erasures) => (buffers, erasures.one_more()),
        };
        let own = buffers.iter().all(|buffer| erasures.undo::<T>(buffer).is_some());
        own.then_some(Handles::Erased(buffers, erasures))
    }
}

impl<'a, Buf: Any> PlaneView<'a, Buf> {
    /// Creates a plane over the caller's buffers, one per segment.
    ///
    /// # Errors
    /// [`DeviceErrorKind::OutOfRange`] if there are fewer buffers than segments. The backend checks
    /// the sizes of buffers.
    pub fn new(layout: PlaneLayout, segments: &'a [Buf]) -> Result<Self, DeviceError> {
        if u64::from(layout.num_segments()) > to_u64(segments.len()) {
            return Err(DeviceError::new(DeviceErrorKind::OutOfRange, "plane").with_detail(
                format!(
                    "{} segments needed, {} buffers given",
                    layout.num_segments(),
                    segments.len()
                ),
            ));
        }
        let (segments, constants) = (Handles::Direct(segments), Handles::Direct(&[]));
        Ok(Self { layout, segments, constants })
    }
    /// Adds the plane's constants, laid out as [`PlaneConstants`]; needed if the layout [has
    /// them](PlaneLayout::has_constants).
    #[must_use]
    pub fn with_constants(mut self, constants: &'a Buf) -> Self {
        self.constants = Handles::Direct(std::slice::from_ref(constants));
        self
    }
    /// Returns the number of buffers.
    pub fn num_segments(&self) -> usize {
        self.segments.len()
    }
    /// Returns the buffer of segment `index`, `None` past the last.
    pub fn segment(&self, index: usize) -> Option<&'a Buf> {
        self.segments.get(index)
    }
    /// Returns the plane's constants: `f32` as [`PlaneConstants`] lays them out.
    pub fn constants(&self) -> Option<&'a Buf> {
        self.constants.get(0)
    }
}

impl<'a> PlaneView<'a, AnyBuffer> {
    /// Returns the plane with a backend's own buffers; `None` if a buffer belongs to another
    /// backend.
    pub(crate) fn downcast<T: Any>(self) -> Option<PlaneView<'a, T>> {
        let (segments, constants) = (self.segments.downcast()?, self.constants.downcast()?);
        Some(PlaneView { layout: self.layout, segments, constants })
    }
}

impl<Buf> PlaneView<'_, Buf> {
    /// Returns where rows lie.
    pub fn layout(&self) -> &PlaneLayout {
        &self.layout
    }
    /// Refuses a plane without the constants that its layout needs.
    pub(crate) fn check_constants(&self) -> Result<(), PlanError> {
        let missing = self.layout.has_constants() && self.constants.len() == 0;
        if missing { Err(PlanError::ConstantsMissing) } else { Ok(()) }
    }
}

/// Every allocated plane of a group.
#[derive(Debug)]
pub struct StorageView<'a, Buf>(pub(super) StorageSource<'a, Buf>);

#[derive(Debug)]
pub(super) enum StorageSource<'a, Buf> {
    Direct(&'a KvStorage<Buf>),
    Erased(&'a KvStorage<AnyBuffer>, Erasures),
}

impl<Buf> Clone for StorageView<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Buf> Copy for StorageView<'_, Buf> {}
impl<Buf> Clone for StorageSource<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Buf> Copy for StorageSource<'_, Buf> {}

impl<'a, Buf> StorageView<'a, Buf> {
    /// Returns the planes that every layer has.
    pub fn layouts(&self) -> &'a BlockPlanes {
        match self.0 {
            StorageSource::Direct(storage) => storage.layouts(),
            StorageSource::Erased(storage, _) => storage.layouts(),
        }
    }
    /// Returns the number of layers with memory.
    pub fn num_layers(&self) -> usize {
        match self.0 {
            StorageSource::Direct(storage) => storage.num_allocated(),
            StorageSource::Erased(storage, _) => storage.num_allocated(),
        }
    }
}

impl<'a, Buf: Any> StorageView<'a, Buf> {
    /// Iterates over the planes, layer by layer, each in the order of [`Self::layouts`].
    pub fn planes(self) -> impl Iterator<Item = PlaneView<'a, Buf>> {
        let (direct, erased) = match self.0 {
            StorageSource::Direct(storage) => (Some(storage), None),
            StorageSource::Erased(storage, erasures) => (None, Some((storage, erasures))),
        };
        let direct = direct.into_iter().flat_map(|storage| {
            storage.layers.iter().flatten().flat_map(|layer| {
                layer.iter().zip(storage.planes.layouts()).map(|(plane, of)| plane.view(*of))
            })
        });
        let erased = erased.into_iter().flat_map(|(storage, erasures)| {
            storage.layers.iter().flatten().flat_map(move |layer| {
                let planes = layer.iter().zip(storage.planes.layouts());
                planes.map(move |(plane, layout)| PlaneView {
                    layout: *layout,
                    segments: Handles::Erased(&plane.segments, erasures),
                    constants: Handles::Erased(plane.constants.as_slice(), erasures),
                })
            })
        });
        direct.chain(erased)
    }
}

impl<'a> StorageView<'a, AnyBuffer> {
    /// Returns the planes with a backend's own buffers; `None` if a buffer belongs to another
    /// backend. For functions of a backend beyond the contract.
    pub fn downcast<T: Any>(self) -> Option<StorageView<'a, T>> {
        let (storage, erasures) = match self.0 {
            StorageSource::Direct(storage) => (storage, Erasures::ONE),
            StorageSource::Erased(storage, erasures) => (storage, erasures.one_more()),
        };
        let mut planes = storage.layers.iter().flatten().flat_map(|layer| layer.iter());
        let own = planes.all(|plane| {
            let mut buffers = plane.segments.iter().chain(&plane.constants);
            buffers.all(|buffer| erasures.undo::<T>(buffer).is_some())
        });
        own.then_some(StorageView(StorageSource::Erased(storage, erasures)))
    }
}
