package ovs

import (
	"context"
	"errors"
	"net"
	"time"
)

const (
	retryEvery = 200 * time.Millisecond
	// patience limits one attempt to open a switch whose daemons are starting or stopping.
	patience = 10 * time.Second
)

// Forgets waits until ovs-vswitchd has restarted, which loses the flows and keeps the ports, and repeats Open. It
// implements nimitz.Forgetful.
func (s *Switch) Forgets(ctx context.Context) error {
	if err := s.ended(ctx); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		try, cancel := context.WithTimeout(ctx, patience)
		err := s.open(try)
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		case <-time.After(retryEvery):
		}
	}
}

// ended waits until the daemon that was opened is gone: a connection to it then closes. The daemon's PID is in the name
// of its socket.
func (s *Switch) ended(ctx context.Context) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", controlSocket(s.config.RunDir, s.opened))
	if err != nil {
		return context.Cause(ctx)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	_, _ = conn.Read(make([]byte, 1)) // the daemon sends nothing
	return context.Cause(ctx)
}
