//! A state as a row of bytes, sized for its scenario.

/// The rank has given up: kernels that start now fill their results and signal nothing.
pub(crate) const POISON: u8 = 1;
/// The running call was refused and the communicator goes on (`Refusal::Continue`).
pub(crate) const REFUSED: u8 = 2;
/// The abort word in host memory.
pub(crate) const ABORT: u8 = 4;
/// The arrive kernel has staged a new count for the copies of the flags.
pub(crate) const STAGED: u8 = 8;

/// A CTA of the running kernel has found a fault; the last to leave turns that into poison.
pub(crate) const FAULT: u8 = 16;

/// What a result is filled with when its call fails.
pub(crate) const FILL: u8 = 0xFF;

/// Where each variable of a state lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) ranks: usize,
    pub(crate) buffers: usize,
    parities: usize,
    lanes: usize,
    latch: usize,
    mask: usize,
    places: usize,
    payload: usize,
    posted: usize,
    arrivals: usize,
    expected: usize,
    epoch: usize,
    flags: usize,
    failed: usize,
    session: usize,
    owner: usize,
    cells: usize,
    pub(crate) size: usize,
}

impl Shape {
    pub(crate) fn new(
        [agents, ctas]: [usize; 2],
        ranks: usize,
        parities: u8,
        buffers: usize,
        lanes: usize,
    ) -> Shape {
        let parities = usize::from(parities);
        let mut end = agents;
        let mut take = |bytes: usize| {
            end += bytes;
            end - bytes
        };
        let words = ranks * parities * ranks;
        let mut shape = Shape {
            ranks,
            buffers,
            parities,
            lanes,
            latch: take(ctas),
            mask: take(ctas),
            places: take(ctas),
            payload: take(words),
            posted: take(words),
            arrivals: take(words),
            expected: take(words),
            epoch: take(ranks),
            flags: take(ranks),
            failed: take(ranks),
            session: take(ranks),
            owner: take(ranks * buffers),
            cells: take(ranks * buffers * ranks * lanes),
            size: 0,
        };
        shape.size = end;
        shape
    }

    /// Program counter of an agent.
    pub(crate) fn pc(&self, agent: usize) -> usize {
        agent
    }
    /// The epoch that a CTA latched.
    pub(crate) fn latch(&self, cta: usize) -> usize {
        self.latch + cta
    }
    /// What a CTA has done of a step that its threads do in any order.
    pub(crate) fn mask(&self, cta: usize) -> usize {
        self.mask + cta
    }
    /// The landing places that a CTA has read, two bits per peer.
    pub(crate) fn places(&self, cta: usize) -> usize {
        self.places + cta
    }

    fn word(&self, receiver: usize, epoch: u8, source: usize) -> usize {
        (receiver * self.parities + usize::from(epoch) % self.parities) * self.ranks + source
    }
    /// Payload of the header from `source` in the memory of `receiver`.
    pub(crate) fn payload(&self, receiver: usize, epoch: u8, source: usize) -> usize {
        self.payload + self.word(receiver, epoch, source)
    }
    /// Epoch of that header.
    pub(crate) fn posted(&self, receiver: usize, epoch: u8, source: usize) -> usize {
        self.posted + self.word(receiver, epoch, source)
    }
    pub(crate) fn arrivals(&self, receiver: usize, epoch: u8, source: usize) -> usize {
        self.arrivals + self.word(receiver, epoch, source)
    }
    pub(crate) fn expected(&self, receiver: usize, epoch: u8, source: usize) -> usize {
        self.expected + self.word(receiver, epoch, source)
    }

    /// Calls that a rank has finished.
    pub(crate) fn epoch(&self, rank: usize) -> usize {
        self.epoch + rank
    }
    pub(crate) fn flags(&self, rank: usize) -> usize {
        self.flags + rank
    }
    /// The call in which a rank gave up, 0 for none.
    pub(crate) fn failed(&self, rank: usize) -> usize {
        self.failed + rank
    }
    /// Resets that a rank has been through.
    pub(crate) fn session(&self, rank: usize) -> usize {
        self.session + rank
    }
    /// The epoch for which a buffer is posted, 0 for none. Only properties look at it.
    pub(crate) fn owner(&self, rank: usize, buffer: usize) -> usize {
        self.owner + rank * self.buffers + buffer
    }
    /// The call whose bytes a lane's region of a buffer holds, 0 for none.
    pub(crate) fn cell(&self, rank: usize, buffer: usize, source: usize, lane: usize) -> usize {
        self.cells + ((rank * self.buffers + buffer) * self.ranks + source) * self.lanes + lane
    }
}

/// Payload words of a header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    pub(crate) place: u8,
    pub(crate) arrivals: u8,
    pub(crate) refused: bool,
    pub(crate) hash: bool,
}

impl Header {
    pub(crate) fn pack(self) -> u8 {
        self.place | (self.arrivals << 2) | (u8::from(self.refused) << 4) | (u8::from(self.hash) << 5)
    }
    pub(crate) fn unpack(byte: u8) -> Header {
        Header { place: byte & 3, arrivals: (byte >> 2) & 3, refused: byte & 16 != 0, hash: byte & 32 != 0 }
    }
}
