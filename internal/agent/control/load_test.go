package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
)

// loadCluster answers load reports.
type loadCluster struct {
	pilasterv1connect.NodeServiceClient
	begin  time.Time
	answer func(call int) (*pilasterv1.ReportLoadResponse, error)
	calls  []string // when, and what was reported
}

func (c *loadCluster) ReportLoad(
	_ context.Context, req *connect.Request[pilasterv1.ReportLoadRequest],
) (*connect.Response[pilasterv1.ReportLoadResponse], error) {
	c.calls = append(c.calls, fmt.Sprint(time.Since(c.begin).Round(time.Second), " ", req.Msg.Load.Own))
	resp, err := c.answer(len(c.calls))
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(resp), nil
}

// loadMeter reports whether packet load was wanted as the load.
type loadMeter struct{ measures bool }

func (m *loadMeter) Load(measure bool) (*pilasterv1.NodeLoad, error) {
	if m.measures = measure; measure {
		return &pilasterv1.NodeLoad{Own: 1}, nil
	}
	return &pilasterv1.NodeLoad{}, nil
}

func (m *loadMeter) Close() error { m.measures = false; return nil }

// TestReportLoads: the orchestrator chooses the period and whether packet load is measured, within bounds; after errors
// the agent waits longer and longer; an orchestrator of a build without loads is asked again after 5 minutes.
func TestReportLoads(t *testing.T) {
	next := func(after time.Duration, measure bool) (*pilasterv1.ReportLoadResponse, error) {
		return &pilasterv1.ReportLoadResponse{NextMs: uint32(after.Milliseconds()), Measure: measure}, nil
	}
	for _, c := range []struct {
		name     string
		answer   func(call int) (*pilasterv1.ReportLoadResponse, error)
		lasts    time.Duration
		want     []string // when, and with packet load or not
		measures bool
	}{
		{"each 10 s, with packet load from the first answer on", func(int) (*pilasterv1.ReportLoadResponse, error) {
			return next(10*time.Second, true)
		}, 25 * time.Second, []string{"0s 0", "10s 1", "20s 1"}, true},
		{"packet load no more", func(call int) (*pilasterv1.ReportLoadResponse, error) {
			return next(10*time.Second, call == 1)
		}, 25 * time.Second, []string{"0s 0", "10s 1", "20s 0"}, false},
		{"too often", func(int) (*pilasterv1.ReportLoadResponse, error) {
			return next(0, false)
		}, 2500 * time.Millisecond, []string{"0s 0", "1s 0", "2s 0"}, false},
		{"too rarely", func(int) (*pilasterv1.ReportLoadResponse, error) {
			return next(24*time.Hour, true)
		}, 6 * time.Minute, []string{"0s 0", "5m0s 1"}, true},
		{"a build without loads", func(call int) (*pilasterv1.ReportLoadResponse, error) {
			if call == 2 {
				return nil, connect.NewError(connect.CodeUnimplemented, errors.New("unknown"))
			}
			return next(10*time.Second, true)
		}, 325 * time.Second, []string{"0s 0", "10s 1", "5m10s 0", "5m20s 1"}, true},
		{"errors", func(call int) (*pilasterv1.ReportLoadResponse, error) {
			if call > 1 && call < 5 {
				return nil, connect.NewError(connect.CodeUnavailable, errors.New("no leader"))
			}
			return next(10*time.Second, true)
		}, 32 * time.Second, []string{"0s 0", "10s 1", "11s 0", "13s 0", "17s 0", "27s 1"}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cluster := &loadCluster{begin: time.Now(), answer: c.answer}
				l := New(Config{
					Log: slog.New(slog.DiscardHandler),
					Wait: func(ctx context.Context, n int, _ time.Duration) error {
						time.Sleep(time.Second << n)
						return ctx.Err()
					},
				})
				l.client, l.status.Connected = cluster, true
				ctx, cancel := context.WithCancel(t.Context())
				m := &loadMeter{}
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					l.ReportLoads(ctx, m, nil)
				}()
				time.Sleep(c.lasts)
				synctest.Wait()
				if !slices.Equal(cluster.calls, c.want) || m.measures != c.measures {
					t.Errorf("reported %q, measures %v; want %q, %v", cluster.calls, m.measures, c.want, c.measures)
				}
				cancel()
				<-ended
				if m.measures {
					t.Error("packet load is measured after the end")
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		l := New(Config{Log: slog.New(slog.DiscardHandler)})
		cluster := &loadCluster{begin: time.Now(), answer: func(int) (*pilasterv1.ReportLoadResponse, error) {
			return next(time.Second, true)
		}}
		l.client = cluster
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if l.ReportLoads(ctx, &loadMeter{}, nil); len(cluster.calls) > 0 {
			t.Error("load is reported without a connection")
		}
	})
	synctest.Test(t, func(t *testing.T) {
		cluster := &loadCluster{begin: time.Now(), answer: func(int) (*pilasterv1.ReportLoadResponse, error) {
			return next(time.Minute, true)
		}}
		l := New(Config{Log: slog.New(slog.DiscardHandler)})
		l.client, l.status.Connected = cluster, true
		due := make(chan struct{}, 1)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Second)
		defer cancel()
		go func() {
			time.Sleep(10 * time.Second)
			due <- struct{}{}
			synctest.Wait()
			due <- struct{}{} // not twice in a second
		}()
		l.ReportLoads(ctx, &loadMeter{}, due)
		if want := []string{"0s 0", "10s 1", "11s 1"}; !slices.Equal(cluster.calls, want) {
			t.Errorf("when the node became a member, it reported %q, want %q", cluster.calls, want)
		}
	})
}
