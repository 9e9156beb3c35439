package packet

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

const (
	captureBuffer = 64 << 20 // bytes the kernel buffers until Next reads them
	maxFrame      = 1 << 18  // GSO packets are captured whole
	macBytes      = 6
)

// Captured is one frame as the kernel saw it.
type Captured struct {
	Time            time.Time // in the first milliseconds of a capture this may be the time of reading
	Frame           []byte
	Outgoing        bool // left through the device; otherwise it came in
	ChecksumPartial bool // the device still has to fill in the checksum
}

// Packet decodes the frame.
func (c Captured) Packet() (Packet, error) { return DecodeFrame(c.Frame) }

// Capture captures frames on a device. The kernel buffers those that were not read yet.
type Capture struct {
	file   *os.File
	device string
	buffer []byte
	lost   uint64
}

// CaptureOption changes what a capture sees.
type CaptureOption func(fd int) error

// IncomingOnly excludes frames that leave through the device.
func IncomingOnly(fd int) error {
	return unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1)
}

// NewCapture starts a capture. It contains all frames after NewCapture returned, and none before.
func NewCapture(ns *netns.Namespace, device string, options ...CaptureOption) (*Capture, error) {
	fd, _, err := openSocket(ns, device, unix.ETH_P_ALL, unix.SOCK_NONBLOCK, func(fd int) error {
		for _, set := range options {
			if err := set(fd); err != nil {
				return err
			}
		}
		return errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, captureBuffer),
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1),
			unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_AUXDATA, 1),
		)
	})
	if err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	return &Capture{file: os.NewFile(uintptr(fd), device), device: device, buffer: make([]byte, maxFrame)}, nil
}

func (c *Capture) Close() error { return c.file.Close() }

// Next waits for a frame. It fails when ctx ends.
func (c *Capture) Next(ctx context.Context) (Captured, error) {
	if err := c.file.SetReadDeadline(time.Time{}); err != nil {
		return Captured{}, err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.file.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	conn, err := c.file.SyscallConn()
	if err != nil {
		return Captured{}, err
	}
	var got Captured
	var failed error
	err = conn.Read(func(fd uintptr) bool {
		got, failed = c.receive(int(fd))
		return failed != unix.EAGAIN
	})
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return Captured{}, fmt.Errorf("capture on %s: %w", c.device, context.Cause(ctx))
	case err != nil:
		return Captured{}, fmt.Errorf("capture on %s: %w", c.device, err)
	case failed != nil:
		return Captured{}, fmt.Errorf("capture on %s: %w", c.device, failed)
	}
	return got, nil
}

// Until returns all captured frames up to and including the first frame that matches. It fails if ctx ends first. It
// also fails if the kernel lost frames, because then the absence of a frame proves nothing.
func (c *Capture) Until(ctx context.Context, match func(Captured) bool) ([]Captured, error) {
	var all []Captured
	for {
		got, err := c.Next(ctx)
		if err != nil {
			return all, fmt.Errorf("%w, after %d frames without the awaited one", err, len(all))
		}
		all = append(all, got)
		if !match(got) {
			continue
		}
		if lost, err := c.Lost(); err != nil || lost > 0 {
			return all, errors.Join(err, fmt.Errorf("capture on %s: %d frames left out", c.device, lost))
		}
		return all, nil
	}
}

// Lost returns how many frames the kernel has dropped since the start because the buffer was full.
func (c *Capture) Lost() (uint64, error) {
	conn, err := c.file.SyscallConn()
	if err != nil {
		return 0, err
	}
	var failed error
	err = conn.Control(func(fd uintptr) {
		var stats *unix.TpacketStats
		if stats, failed = unix.GetsockoptTpacketStats(int(fd), unix.SOL_PACKET,
			unix.PACKET_STATISTICS); failed == nil {
			c.lost += uint64(stats.Drops) // reading resets the kernel's counter
		}
	})
	return c.lost, errors.Join(err, failed)
}

func (c *Capture) receive(fd int) (Captured, error) {
	control := make([]byte, 256)
	n, nc, flags, from, err := unix.Recvmsg(fd, c.buffer, control, 0)
	for err == unix.EINTR {
		n, nc, flags, from, err = unix.Recvmsg(fd, c.buffer, control, 0)
	}
	if err != nil {
		return Captured{}, err
	}
	if flags&unix.MSG_TRUNC != 0 {
		return Captured{}, fmt.Errorf("frame longer than %d bytes", maxFrame)
	}
	got := Captured{Frame: append([]byte(nil), c.buffer[:n]...)}
	if link, ok := from.(*unix.SockaddrLinklayer); ok {
		got.Outgoing = link.Pkttype == unix.PACKET_OUTGOING
	}
	messages, err := unix.ParseSocketControlMessage(control[:nc])
	if err != nil {
		return Captured{}, err
	}
	for _, m := range messages {
		switch {
		case m.Header.Level == unix.SOL_SOCKET && m.Header.Type == unix.SO_TIMESTAMPNS &&
			len(m.Data) >= int(unsafe.Sizeof(unix.Timespec{})):
			ts := (*unix.Timespec)(unsafe.Pointer(&m.Data[0]))
			got.Time = time.Unix(ts.Unix())
		case m.Header.Level == unix.SOL_PACKET && m.Header.Type == unix.PACKET_AUXDATA &&
			len(m.Data) >= int(unsafe.Sizeof(unix.TpacketAuxdata{})):
			aux := (*unix.TpacketAuxdata)(unsafe.Pointer(&m.Data[0]))
			got.ChecksumPartial = aux.Status&unix.TP_STATUS_CSUMNOTREADY != 0
			if aux.Status&unix.TP_STATUS_VLAN_VALID != 0 && len(got.Frame) >= 2*macBytes {
				got.Frame = retag(got.Frame, aux)
			}
		}
	}
	return got, nil
}

// retag reinserts the VLAN tag, which the kernel removes and passes beside the frame.
func retag(frame []byte, aux *unix.TpacketAuxdata) []byte {
	kind := uint16(unix.ETH_P_8021Q)
	if aux.Status&unix.TP_STATUS_VLAN_TPID_VALID != 0 {
		kind = aux.Vlan_tpid
	}
	tag := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, kind), aux.Vlan_tci)
	return slices.Insert(frame, 2*macBytes, tag...)
}
