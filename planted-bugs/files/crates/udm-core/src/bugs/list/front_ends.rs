//! Bugs of the NBD server and client, and of disks of virtual machines.

macro_rules! front_ends_bugs {
    ({$($all:tt)*} $($next:ident)*) => {
        collect_bugs! { {
            $($all)*
            /// Received bytes that cross the end of a buffer lose a byte when they are copied to the next
            /// buffer.
            CutLosesByte: Nbd,
            /// After a short send, the rest is sent from the start of the send.
            AnswerSentTwice: Nbd,
            /// After a short send, the buffer of the rest returns to the pool before the rest is sent.
            BufferBackEarly: Nbd,
            /// A connection that may exceed the memory budget of its core keeps this right when it no
            /// longer needs it.
            PassKept: Nbd,
            /// Memory that a connection releases still counts against the budget of its core.
            BudgetKept: Nbd,
            /// A connection that no longer waits for memory keeps its place in the queue.
            LineKept: Nbd,
            /// A connection with nothing in flight answers a flush without sending it to the device.
            FlushWhenIdle: Nbd,
            /// A write of a partial block does not wait for its range lock.
            HoldSkipped: Nbd,
            /// A connection moves to another core without the bytes that were received and not yet parsed.
            UnreadLeftBehind: Nbd,
            /// A connection ends, and its core keeps its lane of the device open.
            LaneKept: Nbd,
            /// A request whose client has disconnected still counts as in flight on its device.
            InFlightKept: Nbd,
            /// A block status reply describes blocks beyond the requested range.
            StatusTooLong: Nbd,
            /// A connection that moved to another core keeps its slot on the first core.
            PlaceKept: Nbd,
            /// No flush follows a FUA write-zeroes or a FUA trim.
            ZeroesFuaForgotten: Nbd,
            /// Writes that wait for a range lock are not retried when the lock is released.
            ParkedForgotten: Nbd,
            /// A reply of an NBD server to a request that is not in flight is ignored.
            AnswerToNothing: NbdClient,
            /// A reply of an NBD server is taken for the request that has reused the slot.
            AnswerToAnother: NbdClient,
            /// A read of which an NBD server sent only a part completes as whole.
            PartTaken: NbdClient,
            /// An NBD server refuses a write before it has all the data, and the write completes while its
            /// data is being sent.
            EarlyEnds: NbdClient,
            /// If a write does not fit into one send, its rest is not sent.
            RestOfWriteLost: NbdClient,
            /// After a short send, the rest is not sent.
            RestNotSent: NbdClient,
            /// An interrupted send closes the connection to an NBD server.
            InterruptedLost: NbdClient,
            /// A send that fails with ENOMEM or ENOBUFS is retried at once, without a pause.
            ShortageSpins: NbdClient,
            /// An NBD server announces its shutdown, and the connection is kept and used.
            ShutdownStays: NbdClient,
            /// A FUA write is sent to an NBD server without the FUA flag.
            FuaNotAsked: NbdClient,
            /// An NBD server that returns with another size is accepted.
            SizeChangeTaken: NbdClient,
            /// A handshake with an NBD server has no timeout.
            HandshakeUnwatched: NbdClient,
            /// A write that an NBD server may still carry out is retried elsewhere at once.
            RetryBeforeFence: NbdClient,
            /// A write with a preflush is sent to an NBD server without the flush.
            FlushFirstForgotten: NbdClient,
            /// A lane that cannot connect retries at once.
            NoBackOff: NbdClient,
            /// Requests that wait are lost when their connection is lost.
            LostWithConnection: NbdClient,
            /// A completed request of a virtual machine gets two used entries.
            UsedTwice: VhostUser,
            /// The index of a used ring is published before the entry is written.
            UsedIndexEarly: VhostUser,
            /// The first request of an idle queue is not marked as in flight before it is started.
            FirstNotMarked: VhostUser,
            /// A new server forgets the last request that was in flight.
            InFlightForgotten: VhostUser,
            /// A new server takes the requests that were in flight from the available ring again.
            InFlightTakenAgain: VhostUser,
            /// A core goes to sleep without a second look at a ring.
            NoSecondLook: VhostUser,
            /// A server reads if the guest wants a notification before it publishes what it completed.
            WishReadEarly: VhostUser,
            /// A flush of a virtual machine is answered without waiting for the disk.
            FlushAnsweredEarly: VhostUser,
            /// A region of memory is reported as removed while requests use it.
            MemoryReturnedEarly: VhostUser,
            /// A write is answered before the flush that makes it durable, while the write cache is off.
            FlushAfterWriteForgotten: VhostUser,
            /// The wrap counter of a packed ring stays the same at the end of the ring.
            PackedWrapKept: VhostUser,
            /// The flags of a used descriptor are written before its ID and length.
            PackedFlagsEarly: VhostUser,
            /// A batch of used descriptors is published with its first one before the others are written.
            PackedFirstNotLast: VhostUser,
            /// A used descriptor has the number of the slot instead of the ID of the chain.
            PackedIdIsSlot: VhostUser,
            /// The marks of completed requests of a packed ring are cleared before they are published.
            PackedMarksClearedEarly: VhostUser,
            /// A chain is taken off the free entries of the record before it is marked.
            PackedTakenBeforeMarked: VhostUser,
            /// A new server does not see that the last batch of a packed ring was published.
            PackedBatchForgotten: VhostUser,
        } $($next)* }
    };
}
