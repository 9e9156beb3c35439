package ovs

import (
	"context"
	"errors"
	"net"
	"time"
)

const (
	retryEvery = 200 * time.Millisecond
	// patience bounds one try to open a switch whose daemons are on their way up, or down again.
	patience = 10 * time.Second
)

// Forgets returns when ovs-vswitchd was started again, which loses its flows and keeps its ports, and all of Open is
// done anew. It implements nimitz.Forgetful.
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

// ended waits until the daemon that was opened is not there any more: a connection to it ends with it, and its socket
// has its number in its name.
func (s *Switch) ended(ctx context.Context) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", controlSocket(s.config.RunDir, s.opened))
	if err != nil {
		return context.Cause(ctx)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	_, _ = conn.Read(make([]byte, 1)) // it says nothing
	return context.Cause(ctx)
}
