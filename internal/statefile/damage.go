package statefile

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// ErrLater means that a later build may have written the file. Such a file is not damaged and is never set aside.
var ErrLater = errors.New("a later build wrote it")

// damagedInfix separates the name of a damaged file from the time at which it was set aside.
const damagedInfix = ".damaged-"

// DamagedName returns the original name of a file that was set aside; ok is false for other names.
func DamagedName(name string) (original string, ok bool) {
	original, _, ok = strings.Cut(name, damagedInfix)
	return original, ok
}

// Damages sets damaged files aside and lists them. All methods may be called concurrently. A nil *Damages sets nothing
// aside: it returns the error of each damaged file, so that the caller stops.
type Damages struct {
	disk Disk
	log  *slog.Logger
	now  func() time.Time

	mu  sync.Mutex
	all []damage
}

type damage struct{ path, problem string }

// NewDamages returns an empty list. now may be nil.
func NewDamages(disk Disk, log *slog.Logger, now func() time.Time) *Damages {
	if now == nil {
		now = time.Now
	}
	return &Damages{disk: disk, log: log, now: now}
}

// SetAside renames the file of a CorruptError to NAME.damaged-TIME, and logs and lists it. instead says what the
// program does without the file. SetAside returns the error if it is not a CorruptError, or if a later build may have
// written the file. It returns an error if it cannot rename the file. A missing file is only logged and listed.
func (d *Damages) SetAside(damaged error, instead string) error {
	if err := d.Check(damaged); err != nil {
		return err
	}
	var corrupt *CorruptError
	errors.As(damaged, &corrupt)
	aside := corrupt.Path + damagedInfix + d.now().UTC().Format("20060102T150405.000000000Z")
	switch err := d.disk.on().Rename(corrupt.Path, aside); {
	case errors.Is(err, fs.ErrNotExist):
		aside = ""
	case err != nil:
		return errors.Join(damaged, advise(filepath.Dir(corrupt.Path), fmt.Errorf("setting it aside: %w", err)))
	default:
		if err := d.disk.on().Sync(filepath.Dir(corrupt.Path)); err != nil {
			return errors.Join(damaged, err)
		}
	}
	d.log.Error("a state file is damaged", "file", corrupt.Path, "why", corrupt.Err, "set_aside", aside,
		"instead", instead)
	problem := fmt.Sprintf("%s is damaged: %v", corrupt.Path, corrupt.Err)
	if aside != "" {
		problem += "; it was set aside as " + filepath.Base(aside)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all = append(d.all, damage{corrupt.Path, problem + "\n  " + instead})
	return nil
}

// Check returns the error unless SetAside would rename its file.
func (d *Damages) Check(damaged error) error {
	var corrupt *CorruptError
	if d == nil || !errors.As(damaged, &corrupt) || errors.Is(damaged, ErrLater) {
		return damaged
	}
	return nil
}

// Replaced removes a file from the list: it has valid content again, or is not needed any more.
func (d *Damages) Replaced(path string) {
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var left []damage
	for _, one := range d.all {
		if one.path != path {
			left = append(left, one)
		}
	}
	d.all = left
}

// Problems describes the listed files, in the order in which they were found.
func (d *Damages) Problems() (all []string) {
	if d == nil {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, one := range d.all {
		all = append(all, one.problem)
	}
	return all
}
