//! Device memory of one group: planes, cut into segments.
use std::any::Any;
use std::fmt;

use crate::backend::{AnyBuffer, Backend};
use crate::error::{DeviceError, DeviceErrorKind};
use crate::geometry::PlaneLayout;

/// Which half of a layer.
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

/// Memory of the layers of one group. A layer's memory is allocated once and never grows.
#[derive(Debug)]
pub struct KvStorage<Buf> {
    layouts: [PlaneLayout; 2],
    layers: Vec<Option<[Vec<Buf>; 2]>>,
}

impl<Buf> KvStorage<Buf> {
    /// Cuts the planes for a device; no layer has memory yet.
    ///
    /// # Errors
    /// [`DeviceErrorKind::Unsupported`] when a single block exceeds what the device can bind.
    pub fn new<B: Backend<Buffer = Buf>>(
        backend: &B,
        layouts: [PlaneLayout; 2],
    ) -> Result<Self, DeviceError> {
        let capabilities = backend.capabilities();
        let max = capabilities.buffer_bytes_max.min(capabilities.binding_bytes_max);
        // K and V are cut alike, so that one block lies in the same segment of both.
        let block = layouts.iter().map(PlaneLayout::block_bytes).max().unwrap_or(1);
        let blocks = max.checked_div(block).unwrap_or(0);
        if blocks == 0 {
            return Err(DeviceError::new(DeviceErrorKind::Unsupported, "allocate planes")
                .with_detail(format!("a block of {block} bytes, the device binds {max}")));
        }
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let layouts = layouts.map(|layout| layout.with_segments_of(blocks));
        Ok(Self { layouts, layers: Vec::new() })
    }

    /// Allocates layer `index` of the group, zeroed; `false` when it has memory already.
    ///
    /// # Errors
    /// As [`Backend::alloc`]; then nothing is kept.
    pub fn allocate<B: Backend<Buffer = Buf>>(
        &mut self,
        backend: &B,
        index: usize,
    ) -> Result<bool, DeviceError> {
        if self.is_allocated(index) {
            return Ok(false);
        }
        let plane = |layout: &PlaneLayout| {
            (0..layout.num_segments())
                .map(|segment| backend.alloc(layout.segment_bytes(segment)))
                .collect::<Result<Vec<_>, _>>()
        };
        let [k, v] = &self.layouts;
        let planes = [plane(k)?, plane(v)?];
        if self.layers.len() <= index {
            self.layers.resize_with(index.saturating_add(1), || None);
        }
        if let Some(layer) = self.layers.get_mut(index) {
            *layer = Some(planes);
        }
        Ok(true)
    }

    /// Whether layer `index` of the group has memory.
    pub fn is_allocated(&self, index: usize) -> bool {
        self.layers.get(index).is_some_and(Option::is_some)
    }
    /// Layers that have memory.
    pub fn num_allocated(&self) -> usize {
        self.layers.iter().flatten().count()
    }
    /// Layouts of the K and the V plane.
    pub fn layouts(&self) -> &[PlaneLayout; 2] {
        &self.layouts
    }
    /// One plane of layer `index`, `None` while it has no memory.
    pub fn plane(&self, index: usize, plane: Plane) -> Option<PlaneView<'_, Buf>> {
        let [k, v] = self.layers.get(index)?.as_ref()?;
        let [k_layout, v_layout] = self.layouts;
        Some(match plane {
            Plane::Key => PlaneView { layout: k_layout, segments: Segments::Direct(k) },
            Plane::Value => PlaneView { layout: v_layout, segments: Segments::Direct(v) },
        })
    }
    /// All planes, for operations over every layer at once.
    pub fn view(&self) -> StorageView<'_, Buf> {
        StorageView(StorageSource::Direct(self))
    }
}

/// One plane: where every row lies, and the buffers that hold it.
#[derive(Debug)]
pub struct PlaneView<'a, Buf> {
    layout: PlaneLayout,
    segments: Segments<'a, Buf>,
}

/// The buffers of a plane. They may be stored erased, and are then cast one by one on the way out,
/// which needs no list of its own.
#[derive(Debug)]
enum Segments<'a, Buf> {
    Direct(&'a [Buf]),
    Erased(&'a [AnyBuffer], Erasures),
}

/// How often a buffer was erased: more than once where a backend wraps an erased one.
#[derive(Debug, Clone, Copy)]
struct Erasures(u8);

impl Erasures {
    const ONE: Self = Self(1);

    fn one_more(self) -> Self {
        Self(self.0.saturating_add(1))
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
impl<Buf> Clone for Segments<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Buf> Copy for Segments<'_, Buf> {}

impl<'a, Buf: Any> PlaneView<'a, Buf> {
    /// A plane in buffers of the caller's own, one a segment.
    ///
    /// # Errors
    /// [`DeviceErrorKind::OutOfRange`] when there are fewer buffers than the layout has segments.
    /// The buffers' sizes are compared by the backend.
    pub fn new(layout: PlaneLayout, segments: &'a [Buf]) -> Result<Self, DeviceError> {
        if u64::from(layout.num_segments()) > crate::num::to_u64(segments.len()) {
            return Err(DeviceError::new(DeviceErrorKind::OutOfRange, "plane").with_detail(
                format!(
                    "{} segments needed, {} buffers given",
                    layout.num_segments(),
                    segments.len()
                ),
            ));
        }
        Ok(Self { layout, segments: Segments::Direct(segments) })
    }
    /// Number of buffers.
    pub fn num_segments(&self) -> usize {
        match self.segments {
            Segments::Direct(buffers) => buffers.len(),
            Segments::Erased(buffers, _) => buffers.len(),
        }
    }
    /// Buffer of segment `index`, `None` past the last.
    pub fn segment(&self, index: usize) -> Option<&'a Buf> {
        match self.segments {
            Segments::Direct(buffers) => buffers.get(index),
            Segments::Erased(buffers, erasures) => erasures.undo(buffers.get(index)?),
        }
    }
}

impl<'a> PlaneView<'a, AnyBuffer> {
    /// The same plane in a backend's own buffers; `None` when a buffer is another backend's.
    pub(crate) fn downcast<T: Any>(self) -> Option<PlaneView<'a, T>> {
        let (buffers, erasures) = match self.segments {
            Segments::Direct(buffers) => (buffers, Erasures::ONE),
            Segments::Erased(buffers, erasures) => (buffers, erasures.one_more()),
        };
        let own = buffers.iter().all(|buffer| erasures.undo::<T>(buffer).is_some());
        let segments = Segments::Erased(buffers, erasures);
        own.then_some(PlaneView { layout: self.layout, segments })
    }
}

impl<Buf> PlaneView<'_, Buf> {
    /// Where rows lie.
    pub fn layout(&self) -> &PlaneLayout {
        &self.layout
    }
}

/// Every allocated plane of a group.
#[derive(Debug)]
pub struct StorageView<'a, Buf>(StorageSource<'a, Buf>);

#[derive(Debug)]
enum StorageSource<'a, Buf> {
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
    /// Layouts of the K and the V planes.
    pub fn layouts(&self) -> &'a [PlaneLayout; 2] {
        match self.0 {
            StorageSource::Direct(storage) => storage.layouts(),
            StorageSource::Erased(storage, _) => storage.layouts(),
        }
    }
}

impl<'a, Buf: Any> StorageView<'a, Buf> {
    /// The planes, K then V, layer by layer.
    pub fn planes(self) -> impl Iterator<Item = PlaneView<'a, Buf>> {
        let (direct, erased) = match self.0 {
            StorageSource::Direct(storage) => (Some(storage), None),
            StorageSource::Erased(storage, erasures) => (None, Some((storage, erasures))),
        };
        let direct = direct.into_iter().flat_map(|storage| {
            storage.layers.iter().flatten().flat_map(|layer| {
                layer.iter().zip(storage.layouts).map(|(segments, layout)| PlaneView {
                    layout,
                    segments: Segments::Direct(segments.as_slice()),
                })
            })
        });
        let erased = erased.into_iter().flat_map(|(storage, erasures)| {
            storage.layers.iter().flatten().flat_map(move |layer| {
                layer.iter().zip(storage.layouts).map(move |(segments, layout)| PlaneView {
                    layout,
                    segments: Segments::Erased(segments.as_slice(), erasures),
                })
            })
        });
        direct.chain(erased)
    }
}

impl<'a> StorageView<'a, AnyBuffer> {
    /// The same planes in a backend's own buffers; `None` when a buffer is another backend's.
    pub(crate) fn downcast<T: Any>(self) -> Option<StorageView<'a, T>> {
        let (storage, erasures) = match self.0 {
            StorageSource::Direct(storage) => (storage, Erasures::ONE),
            StorageSource::Erased(storage, erasures) => (storage, erasures.one_more()),
        };
        let mut buffers = storage.layers.iter().flatten().flatten().flatten();
        let own = buffers.all(|buffer| erasures.undo::<T>(buffer).is_some());
        own.then_some(StorageView(StorageSource::Erased(storage, erasures)))
    }
}
