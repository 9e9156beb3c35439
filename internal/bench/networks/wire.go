package networks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/netns"
)

// Wire is what a row puts on the fabric, read from the counters of the client's node's fabric device, with Ethernet
// headers and without segmentation offload.
type Wire struct {
	Network string `json:"network"`
	// TransactionBytes are bytes of a request and a response with a byte each, both directions together.
	TransactionBytes   float64 `json:"transactionBytes"`
	TransactionPackets float64 `json:"transactionPackets"`
	// SegmentBytes are bytes of a packet with a full segment, and SegmentPayload its bytes of payload.
	SegmentBytes   float64 `json:"segmentBytes"`
	SegmentPayload int     `json:"segmentPayload"`
	// Kernel is what the kernel's tables of the client's node have for the other node; nil for our own networks.
	Kernel *KernelState `json:"kernel,omitempty"`
}

// fabricDevice is the device of nodes on the fabric.
const fabricDevice = "eth0"

// Transactions before the counters are read, and those that are counted. In the first ones TCP acknowledges without
// waiting for the response. Of several counts, the one with the fewest packets has no others, such as delayed
// acknowledgements.
const (
	warmTransactions = 64
	transactions     = 50
	counts           = 10
)

// measureWire counts what the packets of a row take on the fabric.
func measureWire(ctx context.Context, n Network, w *scenario.Wire, pair scenario.Pair) (r Wire, err error) {
	if n.Tenant == nil {
		state, err := readKernel(w.Nodes[0].NS)
		if err != nil {
			return r, err
		}
		r.Kernel = &state
	}
	restore, err := w.DisableOffloads()
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, restore()) }()
	r.Network = n.Name
	return r, r.exchange(ctx, w.Nodes[0].NS, pair)
}

// exchangeTime bounds one measurement.
const exchangeTime = 30 * time.Second

// exchange sends transactions over one connection: first with a byte, then with a full segment as the request.
func (r *Wire) exchange(ctx context.Context, node *netns.Namespace, p scenario.Pair) error {
	ctx, cancel := context.WithTimeout(ctx, exchangeTime)
	defer cancel()
	client, server, err := connect(ctx, p)
	if err != nil {
		return err
	}
	defer client.Close()
	defer server.Close()
	deadline, _ := ctx.Deadline()
	if err := errors.Join(client.SetDeadline(deadline), server.SetDeadline(deadline)); err != nil {
		return err
	}
	if r.SegmentPayload, err = segmentOf(client); err != nil {
		return err
	}
	count := func(size int) (least fabricCounters, err error) {
		for i := range counts {
			before, err := readFabric(node)
			if err != nil {
				return least, err
			}
			if err := transact(client, server, size, transactions); err != nil {
				return least, err
			}
			after, err := readFabric(node)
			if err != nil {
				return least, err
			}
			if now := after.since(before); i == 0 || now.packets() < least.packets() {
				least = now
			}
		}
		return least, nil
	}
	if err := transact(client, server, 1, warmTransactions); err != nil {
		return err
	}
	small, err := count(1)
	if err != nil {
		return err
	}
	large, err := count(r.SegmentPayload)
	if err != nil {
		return err
	}
	if small.out.packets == 0 || large.out.packets == 0 {
		return fmt.Errorf("%d transactions passed, but %s of the node counted no packets", transactions, fabricDevice)
	}
	r.TransactionBytes = float64(small.out.bytes+small.in.bytes) / transactions
	r.TransactionPackets = float64(small.out.packets+small.in.packets) / transactions
	r.SegmentBytes = float64(large.out.bytes) / float64(large.out.packets)
	return nil
}

// connect connects client and server of a pair.
func connect(ctx context.Context, p scenario.Pair) (client, server *net.TCPConn, err error) {
	var l *net.TCPListener
	err = p.Server.Do(func() (err error) {
		l, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(p.Target, 0)))
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("listen: %w", err)
	}
	defer l.Close()
	deadline, _ := ctx.Deadline()
	if err := l.SetDeadline(deadline); err != nil {
		return nil, nil, err
	}
	err = p.Client.Do(func() error {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", l.Addr().String())
		if err == nil {
			client = c.(*net.TCPConn)
		}
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("connect: %w", err)
	}
	server, err = l.AcceptTCP()
	if err != nil {
		client.Close()
		return nil, nil, fmt.Errorf("accept: %w", err)
	}
	return client, server, nil
}

// segmentOf returns the bytes of payload of a full segment.
func segmentOf(c *net.TCPConn) (size int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	failed := raw.Control(func(fd uintptr) {
		size, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG)
	})
	return size, errors.Join(err, failed)
}

// transact sends requests of the given size; each is answered by a byte.
func transact(client, server *net.TCPConn, size, times int) error {
	answered := make(chan error, 1)
	go func() {
		request := make([]byte, size)
		for range times {
			if _, err := io.ReadFull(server, request); err != nil {
				answered <- err
				return
			}
			if _, err := server.Write(request[:1]); err != nil {
				answered <- err
				return
			}
		}
		answered <- nil
	}()
	request, response := make([]byte, size), make([]byte, 1)
	for range times {
		if _, err := client.Write(request); err != nil {
			return fmt.Errorf("request: %w", errors.Join(err, server.Close(), <-answered))
		}
		if _, err := io.ReadFull(client, response); err != nil {
			return fmt.Errorf("response: %w", errors.Join(err, server.Close(), <-answered))
		}
	}
	return <-answered
}

// flow is one direction of a device.
type flow struct{ bytes, packets uint64 }

type fabricCounters struct{ out, in flow }

func (c fabricCounters) packets() uint64 { return c.out.packets + c.in.packets }

func (c fabricCounters) since(b fabricCounters) fabricCounters {
	return fabricCounters{
		flow{c.out.bytes - b.out.bytes, c.out.packets - b.out.packets},
		flow{c.in.bytes - b.in.bytes, c.in.packets - b.in.packets},
	}
}

func readFabric(node *netns.Namespace) (c fabricCounters, err error) {
	err = scenario.OnDevice(node, fabricDevice, func(_ *netlink.Handle, d netlink.Link) error {
		s := d.Attrs().Statistics
		if s == nil {
			return errors.New("the kernel reports no counters")
		}
		c = fabricCounters{flow{s.TxBytes, s.TxPackets}, flow{s.RxBytes, s.RxPackets}}
		return nil
	})
	return c, err
}
