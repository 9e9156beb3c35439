package control

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// Periods of load reports. The orchestrator chooses them within these bounds.
const (
	leastLoadPause  = time.Second
	mostLoadPause   = 5 * time.Minute // also the pause after an orchestrator that records no loads
	reportLoadLimit = 10 * time.Second
)

// LoadMeter measures the node's load.
type LoadMeter interface {
	// Load returns the load since the last call, with packet load if measure is set, and was set in the last call.
	Load(measure bool) (*pilasterv1.NodeLoad, error)
	// Close ends the measurement of packet load.
	Close() error
}

// ReportLoads reports the node's load when the orchestrator wants it, and after a value from due, until ctx ends. It
// measures packet load only while the last answer has requested that.
func (l *Link) ReportLoads(ctx context.Context, m LoadMeter, due <-chan struct{}) {
	defer func() {
		if err := m.Close(); err != nil {
			l.config.Log.Warn("ending the measurement of packet load failed", "error", err)
		}
	}()
	measure := false
	for failures := 0; ctx.Err() == nil; {
		resp, err := l.reportLoad(ctx, m, measure)
		if measure = resp.GetMeasure(); connect.CodeOf(err) == connect.CodeUnimplemented {
			resp, err = &pilasterv1.ReportLoadResponse{NextMs: uint32(mostLoadPause.Milliseconds())}, nil
		}
		if err != nil {
			if failures == 2 && ctx.Err() == nil {
				l.config.Log.Warn("the node's load cannot be reported; retrying", "error", err)
			}
			_ = l.config.Wait(ctx, failures, l.spread())
			failures++
			continue
		}
		failures = 0
		pause := time.Duration(resp.GetNextMs()) * time.Millisecond
		if awaitDue(ctx, leastLoadPause, nil) {
			awaitDue(ctx, min(pause, mostLoadPause)-leastLoadPause, due)
		}
	}
}

// awaitDue waits for a time, or until a value comes from due. It returns false when ctx has ended.
func awaitDue(ctx context.Context, pause time.Duration, due <-chan struct{}) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-due:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}

// errNoLink means that no call was made.
var errNoLink = errors.New("this node has no connection to the orchestrator")

func (l *Link) reportLoad(ctx context.Context, m LoadMeter, measure bool) (*pilasterv1.ReportLoadResponse, error) {
	client := l.dialled()
	if client == nil || !l.Status().Connected {
		return nil, errNoLink
	}
	load, err := m.Load(measure)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, reportLoadLimit)
	defer cancel()
	resp, err := client.ReportLoad(ctx, connect.NewRequest(&pilasterv1.ReportLoadRequest{Load: load}))
	if err != nil {
		return nil, err
	}
	return resp.Msg, nil
}
