// Package chaos_test kills, stops and disconnects orchestrators and their etcd cluster at random, while clients join
// nodes, create and delete tenants, rotate keys, publish containers, apply policies and resolve labels. Each client
// logs its calls and their results. Afterwards the test compares the logs with etcd: nothing may have been allocated
// twice, and no acknowledged change may be lost.
//
// By default the test makes a short run; `make chaos` makes a long one by PILASTER_CHAOS_CHANGES. PILASTER_CHAOS_SEED
// reproduces the choices of a run, but not its timing.
package chaos_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"testing"

	"pilaster.io/pilaster/internal/orchestrator"
)

// Environment variables with a JSON configuration, which make this binary act as another program.
const (
	asOrchestrator = "PILASTER_CHAOS_ORCHESTRATOR"
	asClients      = "PILASTER_CHAOS_CLIENTS"
)

func TestMain(m *testing.M) {
	var err error
	if text, ok := os.LookupEnv(asOrchestrator); ok {
		err = beOrchestrator(text)
	} else if text, ok := os.LookupEnv(asClients); ok {
		err = beClients(text)
	} else {
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func beOrchestrator(text string) error {
	var c orchestrator.Config
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return err
	}
	c.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return orchestrator.Run(ctx, c)
}
