package openflow

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

const (
	version   = 5 // OpenFlow 1.4
	headerLen = 8

	typeHello            = 0
	typeError            = 1
	typeEchoRequest      = 2
	typeEchoReply        = 3
	typeFlowMod          = 14
	typeMultipartRequest = 18
	typeMultipartReply   = 19
	typeBarrierRequest   = 20
	typeBarrierReply     = 21
	typeBundleControl    = 33
	typeBundleAdd        = 34

	multipartFlow = 1
	multipartMore = 1

	bundleOpen    = 0
	bundleCommit  = 4
	bundleDiscard = 6
	bundleFlags   = 1 | 2 // atomic and in order
	bundleID      = 1     // a connection has at most one at a time
)

// Conn is a connection to a bridge, for one caller at a time. After an error other than *Error, the connection is
// unusable and the caller must close it.
type Conn struct {
	conn net.Conn
	in   *bufio.Reader
	xid  uint32
}

// Dial connects to a bridge by the path of its management socket.
func Dial(ctx context.Context, path string) (*Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("openflow: %w; is the bridge there, and ovs-vswitchd running?", err)
	}
	c := &Conn{conn: conn, in: bufio.NewReaderSize(conn, 1<<16)}
	if err := c.hello(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("openflow: %s: %w", path, err), conn.Close())
	}
	return c, nil
}

func (c *Conn) Close() error { return c.conn.Close() }

// message is a received message.
type message struct {
	kind byte
	xid  uint32
	body []byte
}

func (c *Conn) hello(ctx context.Context) error {
	b := begin(nil, typeHello, c.next())
	b = append(b, 0, 1, 0, 8, 0, 0, 0, 1<<version) // our version only
	end(b, 0)
	return c.exchange(ctx, b, func(m message) (bool, error) {
		switch m.kind {
		case typeHello:
			return true, nil
		case typeError:
			return true, readError(m.body, "hello")
		}
		return false, nil
	})
}

// Barrier waits until the bridge has processed all earlier requests.
func (c *Conn) Barrier(ctx context.Context) error {
	b, xid := c.barrier(nil)
	return c.exchange(ctx, b, func(m message) (bool, error) { return m.xid == xid && m.kind == typeBarrierReply, nil })
}

func (c *Conn) barrier(b []byte) ([]byte, uint32) {
	xid, start := c.next(), len(b)
	b = begin(b, typeBarrierRequest, xid)
	end(b, start)
	return b, xid
}

// Apply makes all changes in order, or none. An *Error names the change that the bridge rejected.
func (c *Conn) Apply(ctx context.Context, changes []Change) error {
	b := c.bundle(nil, bundleOpen)
	first := c.xid + 1
	for _, change := range changes {
		xid, start := c.next(), len(b)
		b = begin(b, typeBundleAdd, xid)
		b = append(b, 0, 0, 0, bundleID, 0, 0, 0, bundleFlags)
		inner := len(b)
		b = begin(b, typeFlowMod, xid)
		b = change.append(b)
		if len(b)-start > 0xffff {
			return fmt.Errorf("openflow: %v: longer than a message can be", change.Flow)
		}
		end(b, inner)
		end(b, start)
	}
	// A commit would apply the valid part of the bundle. So Apply commits only after the bridge has accepted the whole
	// bundle.
	b, done := c.barrier(b)
	var refused error
	listen := func(m message) (bool, error) {
		if m.kind == typeError && refused == nil {
			about := "bundle"
			if n := int(m.xid - first); n < len(changes) {
				about = fmt.Sprintf("%v flow of %v", changes[n].Command, changes[n].Flow)
			}
			refused = readError(m.body, about)
		}
		return m.xid == done && (m.kind == typeBarrierReply || m.kind == typeError), nil
	}
	if err := c.exchange(ctx, b, listen); err != nil {
		return err
	}
	last := byte(bundleCommit)
	if refused != nil {
		last = bundleDiscard
	}
	b = c.bundle(nil, last)
	b, done = c.barrier(b)
	if err := c.exchange(ctx, b, listen); err != nil {
		return err
	}
	return refused
}

func (c *Conn) bundle(b []byte, kind byte) []byte {
	start := len(b)
	b = begin(b, typeBundleControl, c.next())
	b = append(b, 0, 0, 0, bundleID, 0, kind, 0, bundleFlags)
	end(b, start)
	return b
}

// Flows reads the flows of all tables. It returns those whose cookie equals cookie in the bits of mask.
func (c *Conn) Flows(ctx context.Context, cookie, mask uint64) ([]Flow, error) {
	xid := c.next()
	b := begin(nil, typeMultipartRequest, xid)
	b = appendFlowRequest(b, cookie, mask)
	end(b, 0)
	var all []Flow
	err := c.exchange(ctx, b, func(m message) (bool, error) {
		if m.xid != xid {
			return false, nil
		}
		if m.kind == typeError {
			return true, readError(m.body, "read flows")
		}
		flows, more, err := readReply(m)
		all = append(all, flows...)
		return !more, err
	})
	return all, err
}

// readReply reads one part of the reply to Flows.
func readReply(m message) (flows []Flow, more bool, err error) {
	if m.kind != typeMultipartReply || len(m.body) < 8 || binary.BigEndian.Uint16(m.body) != multipartFlow {
		return nil, false, fmt.Errorf("openflow: message of type %d where flows were asked for", m.kind)
	}
	flows, err = readFlows(m.body[8:])
	return flows, binary.BigEndian.Uint16(m.body[2:])&multipartMore != 0, err
}

func (c *Conn) next() uint32 {
	c.xid++
	return c.xid
}

// begin writes a header; end fills in its length.
func begin(b []byte, kind byte, xid uint32) []byte {
	return binary.BigEndian.AppendUint32(append(b, version, kind, 0, 0), xid)
}

func end(b []byte, start int) { binary.BigEndian.PutUint16(b[start+2:], uint16(len(b)-start)) }

// exchange sends requests and passes each received message to listen, until listen returns true. It reads while it
// writes, because a bridge that has many errors to send stops reading until the client has received them.
func (c *Conn) exchange(ctx context.Context, requests []byte, listen func(message) (bool, error)) error {
	if err := c.conn.SetDeadline(time.Time{}); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = c.conn.SetDeadline(time.Unix(1, 0)) })()
	wrote := make(chan error, 1)
	go func() {
		_, err := c.conn.Write(requests)
		if err != nil {
			_ = c.conn.SetDeadline(time.Unix(1, 0)) // no reply will come
		}
		wrote <- err
	}()
	err := c.listen(listen)
	if err != nil && !errors.As(err, new(*Error)) {
		_ = c.conn.SetDeadline(time.Unix(1, 0))
	}
	if sent := <-wrote; sent != nil {
		err = sent
	}
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return err
}

func (c *Conn) listen(listen func(message) (bool, error)) error {
	for {
		m, err := readMessage(c.in)
		if err != nil {
			return err
		}
		if m.kind == typeEchoRequest {
			b := append(begin(nil, typeEchoReply, m.xid), m.body...)
			end(b, 0)
			if _, err := c.conn.Write(b); err != nil {
				return err
			}
			continue
		}
		if enough, err := listen(m); enough || err != nil {
			return err
		}
	}
}

func readMessage(r io.Reader) (m message, err error) {
	var h [headerLen]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return m, err
	}
	length := int(binary.BigEndian.Uint16(h[2:]))
	if length < headerLen {
		return m, fmt.Errorf("openflow: message of %d bytes", length)
	}
	m = message{h[1], binary.BigEndian.Uint32(h[4:]), make([]byte, length-headerLen)}
	_, err = io.ReadFull(r, m.body)
	return m, err
}
