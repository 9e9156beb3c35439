package accelerate

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// batch is what the daemon received from one socket of the kernel.
type batch struct {
	messages []syscall.NetlinkMessage
	lost     bool // the kernel had more messages than the socket has room for
}

// watch receives the kernel's notifications. Both sockets are open before the daemon reads the present state.
type watch struct {
	routes chan batch // of devices, neighbours, routes, qdiscs
	rules  chan error // rules of nftables have changed, and what voiding the cache returned
	failed chan error
	done   sync.WaitGroup
}

// receiveBuffer is the room for notifications in bytes. A node that lists 10,000 routes at once needs about 2 MB.
const receiveBuffer = 8 << 20

// startWatch calls void at once when rules have changed, also while the loop is busy.
func startWatch(ctx context.Context, void func() error) (*watch, error) {
	w := &watch{routes: make(chan batch), rules: make(chan error, 1), failed: make(chan error, 2)}
	routes := func(b batch) {
		select {
		case w.routes <- b:
		case <-ctx.Done():
		}
	}
	rules := func(b batch) {
		if !rulesHaveChanged(b) {
			return
		}
		err := void()
		select {
		case before := <-w.rules: // the loop has not seen yet
			err = errors.Join(before, err)
		default:
		}
		w.rules <- err // has room: nothing else sends
	}
	for _, s := range []struct {
		name     string
		protocol int
		handle   func(batch)
		groups   []uint
	}{
		{"devices and routes", unix.NETLINK_ROUTE, routes, []uint{
			unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_TC, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
			unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_NEXTHOP,
		}},
		{"nftables", unix.NETLINK_NETFILTER, rules, []uint{unix.NFNLGRP_NFTABLES}},
	} {
		socket, err := nl.Subscribe(s.protocol, s.groups...)
		if err == nil {
			err = errors.Join(socket.SetReceiveBufferSize(receiveBuffer, true),
				socket.SetReceiveTimeout(&unix.Timeval{Usec: 200_000})) // how long the end may take
		}
		if err != nil {
			return nil, fmt.Errorf("receive notifications of %s: %w", s.name, err)
		}
		w.done.Go(func() {
			defer socket.Close()
			if err := receive(ctx, socket, s.handle); err != nil {
				w.failed <- fmt.Errorf("receive notifications of %s: %w", s.name, err)
			}
		})
	}
	return w, nil
}

func receive(ctx context.Context, socket *nl.NetlinkSocket, handle func(batch)) error {
	for {
		messages, from, err := socket.Receive()
		b := batch{messages: messages}
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS):
			b.lost = true
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		case from.Pid != nl.PidKernel:
			continue
		}
		handle(b)
	}
}
