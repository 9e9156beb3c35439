package sim

import (
	"io"
	"os"
	"sync"
	"time"
)

// window is the number of unread bytes that a stream accepts, as HTTP/2's flow-control window does.
const window = 64 << 10

// keptBuffer is the size of the buffer that an empty stream keeps.
const keptBuffer = 256

// pipe carries a stream's messages to the node. The reader sees written bytes after a flush.
type pipe struct {
	mu       sync.Mutex
	changed  sync.Cond
	buf      []byte
	read     int  // bytes of buf that were read
	flushed  int  // bytes of buf that were flushed
	ended    bool // the writer has ended the stream
	broken   bool // the reader has closed the stream
	waiting  int  // number of blocked writers
	deadline time.Time
}

func newPipe() *pipe {
	p := new(pipe)
	p.changed.L = &p.mu
	return p
}

// Write blocks while the window is full, until the write deadline.
func (p *pipe) Write(b []byte) (n int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(b) > 0 {
		room := window - (len(p.buf) - p.read)
		switch {
		case p.broken || p.ended:
			return n, io.ErrClosedPipe
		case room > 0:
			some := b[:min(room, len(b))]
			p.buf = append(p.buf, some...)
			b, n = b[len(some):], n+len(some)
			continue
		case !p.deadline.IsZero() && !time.Now().Before(p.deadline):
			return n, os.ErrDeadlineExceeded
		}
		p.flush()
		p.await()
	}
	return n, nil
}

// await waits for a change of the pipe, or for the current deadline. The caller holds the lock.
func (p *pipe) await() {
	if !p.deadline.IsZero() {
		timer := time.AfterFunc(time.Until(p.deadline), p.wake)
		defer timer.Stop()
	}
	p.waiting++
	p.changed.Wait()
	p.waiting--
}

func (p *pipe) wake() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changed.Broadcast()
}

func (p *pipe) flush() {
	if p.flushed != len(p.buf) {
		p.flushed = len(p.buf)
		p.changed.Broadcast()
	}
}

// Flush makes written bytes readable.
func (p *pipe) Flush() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.flush()
}

// SetWriteDeadline applies to current and future writes; the zero time means none.
func (p *pipe) SetWriteDeadline(t time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.deadline = t
	if p.waiting > 0 {
		p.changed.Broadcast()
	}
}

// End flushes the written bytes; after them the reader gets io.EOF.
func (p *pipe) End() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	p.flushed = len(p.buf)
	p.changed.Broadcast()
}

func (p *pipe) Read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.read == p.flushed {
		if p.broken {
			return 0, io.ErrClosedPipe
		}
		if p.ended {
			return 0, io.EOF
		}
		p.changed.Wait()
	}
	n := copy(b, p.buf[p.read:p.flushed])
	p.read += n
	if p.read == len(p.buf) {
		p.read, p.flushed = 0, 0
		if p.buf = p.buf[:0]; cap(p.buf) > keptBuffer {
			p.buf = nil
		}
	}
	if p.waiting > 0 {
		p.changed.Broadcast()
	}
	return n, nil
}

// Close ends the stream from the reader's side.
func (p *pipe) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.broken = true
	p.buf, p.read, p.flushed = nil, 0, 0
	p.changed.Broadcast()
	return nil
}
