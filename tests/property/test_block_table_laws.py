"""The laws of `table_machine` over the Python twin of the Redis functions."""

from hypothesis import settings
from table_machine import TableMachine

TableMachine.TestCase.settings = settings(stateful_step_count=50)
TestTableMachine = TableMachine.TestCase
