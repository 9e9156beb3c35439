package traffic

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
)

// Process is a running generator process.
type Process struct {
	cmd    *exec.Cmd
	in     *json.Encoder
	out    *json.Decoder
	errors bytes.Buffer
}

// Start starts a command that calls Generate, by launch, and sends it its job.
func Start(command *exec.Cmd, launch func(*exec.Cmd) error, j Job) (*Process, error) {
	p := &Process{cmd: command}
	command.Stderr = &p.errors
	// Run one thread without preemption by signals and without garbage collection.
	command.Env = append(command.Environ(), "GOMAXPROCS=1", "GOGC=off", "GODEBUG=asyncpreemptoff=1")
	pipe, err := command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	to, err := command.StdinPipe()
	if err != nil {
		return nil, err
	}
	p.out, p.in = json.NewDecoder(pipe), json.NewEncoder(to)
	if err := launch(command); err != nil {
		return nil, err
	}
	return p, p.in.Encode(j)
}

// ID returns the number of the process.
func (p *Process) ID() int { return p.cmd.Process.Pid }

// Send sends a value to a process that waits for one.
func (p *Process) Send(v any) error { return p.in.Encode(v) }

// Answer waits for the next answer.
func (p *Process) Answer() (a Answer, err error) {
	if err := p.out.Decode(&a); err != nil {
		return a, errors.Join(fmt.Errorf("read the generator's answer: %w", err), p.Wait())
	}
	return a, nil
}

// Wait waits until the process has ended.
func (p *Process) Wait() error {
	if err := p.cmd.Wait(); err != nil {
		return fmt.Errorf("%w: %s", err, bytes.TrimSpace(p.errors.Bytes()))
	}
	return nil
}

// Kill ends a process that was not waited for.
func (p *Process) Kill() {
	if p.cmd.ProcessState == nil {
		p.cmd.Process.Kill()
		p.cmd.Wait()
	}
}
