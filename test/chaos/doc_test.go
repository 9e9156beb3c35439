// Package chaos_test kills, stops and cuts off orchestrators and the etcd cluster behind them, at random, while clients
// join nodes, make and delete tenants, rotate keys, publish containers, apply policies and resolve labels. Each client
// writes down what it asked and what it was answered. Afterwards these logs are held against what etcd has: nothing was
// handed out twice, and nothing that was answered is lost.
//
// Alone the test makes a short run; `make chaos` makes the long one by PILASTER_CHAOS_CHANGES. PILASTER_CHAOS_SEED
// repeats the choices of a run, though not its timing.
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

// What this binary is when it was started by itself, with its configuration in JSON.
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
