// Command pilaster is all of Pilaster except the CNI plugin: orchestrator, agent, lab, benchmarks and the commands for
// operators.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"pilaster.io/pilaster/internal/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(cli.Run(ctx, cli.Env{Args: os.Args[1:], Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}))
}
