package ramp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/netns"
)

const (
	port     = 80
	patience = 3 * time.Second // of a connection
	workers  = 8               // that open connections at the same time
)

// traffic opens connections from the client to the server, one byte each way on each.
type traffic struct {
	to       string
	client   *netns.Namespace
	listener net.Listener
	serving  sync.WaitGroup

	opened, failed atomic.Int64
}

type counts struct{ opened, failed int64 }

func (t *traffic) counts() counts { return counts{t.opened.Load(), t.failed.Load()} }

// startTraffic starts the server.
func startTraffic(ctx context.Context, l *lab.Lab) (*traffic, error) {
	address, err := l.Address(server)
	if err != nil {
		return nil, err
	}
	ns, err := l.Namespace(server)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	t := &traffic{to: netip.AddrPortFrom(address, port).String()}
	if err := ns.Do(func() (err error) {
		t.listener, err = (&net.ListenConfig{}).Listen(ctx, "tcp", t.to)
		return err
	}); err != nil {
		return nil, err
	}
	if t.client, err = l.Namespace(client); err != nil {
		return nil, errors.Join(err, t.listener.Close())
	}
	t.serving.Go(t.serve)
	return t, nil
}

func (t *traffic) stop() error {
	err := t.listener.Close()
	t.serving.Wait()
	return errors.Join(err, t.client.Close())
}

func (t *traffic) serve() {
	for {
		conn, err := t.listener.Accept()
		if err != nil {
			return
		}
		t.serving.Go(func() {
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(patience))
			_, _ = io.CopyN(conn, conn, 1)
			_, _ = conn.Read(make([]byte, 1)) // until the client closes
		})
	}
}

// open opens connections for a time. rate returns how many a second at a time since the start. The channel has one
// value, when all are closed.
func (t *traffic) open(ctx context.Context, during time.Duration, rate func(time.Duration) float64) <-chan error {
	due, ended := make(chan struct{}), make(chan error, 1)
	var group sync.WaitGroup
	errs := make([]error, workers)
	for i := range workers {
		group.Go(func() {
			errs[i] = t.client.Do(func() error {
				for range due {
					if t.exchange(ctx) == nil {
						t.opened.Add(1)
					} else {
						t.failed.Add(1)
					}
				}
				return nil
			})
			for range due { // the others wait, if this one could not begin
			}
		})
	}
	go func() {
		begun, owed := time.Now(), 0.0
		const step = 5 * time.Millisecond
		ticks := time.NewTicker(step)
		defer ticks.Stop()
		for last := begun; last.Sub(begun) < during && ctx.Err() == nil; {
			now := <-ticks.C
			for owed += rate(now.Sub(begun)) * now.Sub(last).Seconds(); owed >= 1; owed-- {
				due <- struct{}{}
			}
			last = now
		}
		close(due)
		group.Wait()
		ended <- errors.Join(append(errs, ctx.Err())...)
	}()
	return ended
}

// exchange opens a connection, and closes it after a byte each way, with a reset: so its port is free at once.
func (t *traffic) exchange(ctx context.Context) error {
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(ctx, "tcp", t.to)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := errors.Join(conn.SetDeadline(time.Now().Add(patience)), conn.(*net.TCPConn).SetLinger(0)); err != nil {
		return err
	}
	one := []byte{1}
	if _, err := conn.Write(one); err != nil {
		return err
	}
	if _, err := io.ReadFull(conn, one); err != nil {
		return fmt.Errorf("the server's byte: %w", err)
	}
	return nil
}
