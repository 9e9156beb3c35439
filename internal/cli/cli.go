// Package cli is the command line: flags, output and exit codes. Other packages do the work of the commands. Each file
// has one family of commands.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/unixrpc"
)

// Env is the environment of a command: its arguments and standard streams. Tests set it to run commands within the
// test's process.
type Env struct {
	Args           []string
	Stdin          io.Reader
	Stdout, Stderr io.Writer
}

// Exit codes of every command.
const (
	ExitDone        = 0
	ExitFailed      = 1
	ExitUsage       = 2
	ExitUnreachable = 3 // the orchestrator or agent does not answer
)

// exitError carries an exit code with an error; a nil error prints nothing.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit status %d", e.code)
	}
	return e.err.Error()
}
func (e *exitError) Unwrap() error { return e.err }

// usage returns an error with ExitUsage, which means that the user has to correct the command line.
func usage(format string, args ...any) error {
	return &exitError{ExitUsage, fmt.Errorf(format, args...)}
}

// Run executes one command line and returns its exit code.
func Run(ctx context.Context, env Env) int {
	root := newRoot(env)
	root.SetArgs(env.Args)
	c, err := root.ExecuteContextC(ctx)
	if err == nil {
		return ExitDone
	}
	err = missing(c, err)
	code := exitCode(err)
	var exit *exitError
	if !errors.As(err, &exit) || exit.err != nil {
		fmt.Fprintf(env.Stderr, "error: %s\n", message(err))
		if errors.Is(err, unixrpc.ErrNoListener) {
			fmt.Fprint(env.Stderr, whereTo(c, err))
		}
	}
	return code
}

func exitCode(err error) int {
	var exit *exitError
	if errors.As(err, &exit) {
		return exit.code
	}
	if errors.Is(err, bench.ErrNoFigures) {
		return ExitUsage
	}
	var remote *connect.Error
	if errors.As(err, &remote) {
		switch remote.Code() {
		case connect.CodeUnavailable, connect.CodeDeadlineExceeded:
			return ExitUnreachable
		case connect.CodeInvalidArgument:
			return ExitUsage
		}
	}
	return ExitFailed
}

// message returns the text that the command prints for an error.
func message(err error) string {
	var remote *connect.Error
	if errors.As(err, &remote) && remote.Code() == connect.CodeUnimplemented {
		return "the daemon is older and does not support this command; nothing was changed; upgrade it, or use the " +
			"pilaster of its build"
	}
	return unixrpc.Words(err)
}

// moment formats a time for output: RFC 3339 in UTC, so that outputs of several nodes can be compared.
func moment(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// output is the -o flag of a command with output. It rejects unknown formats when flags are parsed, before the command
// runs.
type output struct {
	format string
	also   []string // formats of this command beside text and json
}

func (o *output) String() string { return o.format }
func (o *output) Type() string   { return "string" }
func (o *output) Set(format string) error {
	if !slices.Contains(o.formats(), format) {
		return fmt.Errorf("use %s", strings.Join(o.formats(), " or "))
	}
	o.format = format
	return nil
}

func (o *output) formats() []string { return append([]string{"text", "json"}, o.also...) }

func (o *output) bind(c *cobra.Command, also ...string) {
	o.format, o.also = "text", also
	c.Flags().VarP(o, "output", "o", strings.Join(o.formats(), " or "))
	_ = c.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(o.formats(), cobra.ShellCompDirectiveNoFileComp))
}

// print writes v as JSON, or calls text with a writer that aligns tab-separated columns.
func (o *output) print(w io.Writer, v any, text func(io.Writer)) error {
	if o.format == "json" {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(v)
	}
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	text(t)
	return t.Flush()
}
